"""Tokens are drawn with their probabilities, from the tokens that may come, alike in every batch."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import prompt

from penstock.engine.draws import Draw, draw_tokens, noise, numbers_of
from penstock.request import SamplingParams

SEEDS = range(5)
NUM_DRAWS, NUM_TOKENS = 20_000, 12
# The least chi-square with 11 degrees of freedom that has a probability below 0.001.
LIMIT = 31.26


def drawn(logits, draws):
    return draw_tokens(logits, torch.from_numpy(numbers_of(draws)), draws).tolist()


def kept(logits, params):
    """The definition, by sorting: equal logits stay or go together."""
    shares = torch.softmax(logits.double() / params.temperature, -1)
    stays = torch.ones_like(shares, dtype=torch.bool)
    if params.top_k is not None:
        stays &= logits >= logits.sort(descending=True).values[min(params.top_k, len(logits)) - 1]
    stays &= shares >= params.min_p * shares.max() * (1 - 1e-6)
    shares = shares * stays / (shares * stays).sum()
    before = torch.stack([shares[logits > value].sum() for value in logits])
    return stays & (before < params.top_p), before


def chi_square(counts, shares):
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


SOME_LOGITS = torch.linspace(0, 2, NUM_TOKENS)


@functools.cache
def counts_of(seed):
    """As one request draws at one place after the other; all at once, with the same noise."""
    params = SamplingParams(temperature=0.8, seed=seed)
    noises = torch.stack([noise(Draw.of(params, seed, place).key, NUM_TOKENS) for place in range(NUM_DRAWS)])
    return torch.bincount((SOME_LOGITS / 0.8 + noises).argmax(-1), minlength=NUM_TOKENS).double()


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_drawn_with_their_probabilities(seed):
    shares = torch.softmax(SOME_LOGITS.double() / 0.8, -1)
    assert chi_square(counts_of(seed), shares) < LIMIT


def test_a_sampler_that_is_wrong_by_a_hundredth_is_found():
    """One part in a hundred of all draws goes to the unlikeliest token."""
    shares = torch.softmax(SOME_LOGITS.double() / 0.8, -1)
    for seed in SEEDS:
        counts = counts_of(seed).clone()
        moved = (counts * 0.01).floor()
        counts -= moved
        counts[0] += moved.sum()
        assert chi_square(counts, shares) > LIMIT


def test_the_race_of_the_chi_square_is_the_one_that_draws():
    draws = [Draw.of(SamplingParams(temperature=0.8), 3, place) for place in range(50)]
    race = [int((SOME_LOGITS / 0.8 + noise(draw.key, NUM_TOKENS)).argmax()) for draw in draws]
    assert drawn(SOME_LOGITS.expand(50, -1), draws) == race


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(-20, 20), min_size=2, max_size=40),
    top_k=st.none() | st.integers(2, 50),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_winner_is_that_of_a_race_among_the_tokens_that_are_kept(values, top_k, top_p, min_p, seed):
    logits = torch.tensor(values) / 3
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    stays, before = kept(logits, params)
    if ((before - top_p).abs() < 1e-5).any():
        return  # rounding decides
    for place in range(8):
        draw = Draw.of(params, seed, place)
        keys = (logits * (1 / 0.9) + noise(draw.key, len(logits))).masked_fill(~stays, -math.inf)
        assert drawn(logits[None], [draw]) == [int(keys.argmax())]


def test_a_row_is_drawn_alike_alone_and_in_a_batch():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3
    asks = [{"temperature": 1}, {}, {"temperature": 2, "top_k": 9}, {"temperature": 0.5, "top_p": 0.4}]
    asks += [{"temperature": 1, "min_p": 0.2}, {"temperature": 1, "top_k": 1}]
    draws = [Draw.of(SamplingParams(**ask), 5, place) for place, ask in enumerate(asks)]
    assert drawn(logits, draws) == [drawn(row[None], [draw])[0] for row, draw in zip(logits, draws, strict=True)]


def test_nothing_is_drawn_where_nothing_may_come_or_a_logit_is_broken():
    logits = torch.zeros(2, 9)
    logits[0] = -math.inf
    logits[1, 4] = math.nan
    assert drawn(logits, [Draw.of(SamplingParams(temperature=1), 1, 0)] * 2) == [-1, -1]


RICH = {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 3}


@pytest.mark.parametrize("values", [{"temperature": 1.5}, RICH, {"presence_penalty": 1.5, "min_tokens": 9}])
def test_a_seed_gives_the_same_tokens_in_chunks_beside_others_and_ahead(load, values):
    asked = {"max_tokens": 14, "ignore_eos": True, "seed": 3} | values
    alone = load().generate(prompt(30), **asked)
    assert load(chunk_size=7).generate(prompt(30), **asked).token_ids == alone.token_ids
    engine = load()
    engine.most_in_flight = 2
    others = [engine.submit(prompt(20 + n), max_tokens=30, ignore_eos=True, temperature=n / 2) for n in range(3)]
    beside = engine.generate(prompt(30), **asked)
    assert beside.token_ids == alone.token_ids
    if alone.logprobs is not None:
        assert [one.token_id for one in beside.logprobs] == list(alone.token_ids)
        assert [one.logprob for one in beside.logprobs] == pytest.approx(
            [one.logprob for one in alone.logprobs], abs=1e-4
        )
    for request_id in others:
        engine.abort(request_id)
