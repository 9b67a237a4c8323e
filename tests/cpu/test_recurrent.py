"""Models with recurrent state: small chunks are right, prefixes come again, and what was cancelled is resumed."""

import dataclasses
import itertools

import pytest
import torch
from float64_reference import float64_logits
from logit_recorder import LogitRecorder
from tiny_models import LATER, RECURRENT, prompt, reference_logits

from penstock.cache.states import StatePool
from penstock.errors import InvalidSetting
from penstock.models.recurrence import RecurrentTokens, advance, advance_singles

TOLERANCE = 1e-4
BLOCK = 16
NUM_GENERATED = 12
ALWAYS = sorted(RECURRENT - LATER)
HYBRIDS = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.evidence) for name in sorted(RECURRENT & LATER))]


def read(engine, tokens, **sampling):
    sampling = {"max_tokens": NUM_GENERATED, "ignore_eos": True} | sampling
    recorder = LogitRecorder(engine)
    output = engine.generate(tokens, **sampling)
    return recorder.all, output


def random_tokens(num_tokens, *, has_beta, heads=3, key_size=8, value_size=5):
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(num_tokens, heads, *shape, generator=generator)

    return RecurrentTokens(
        q_NHK=torch.nn.functional.normalize(normal(key_size), dim=-1),
        k_NHK=torch.nn.functional.normalize(normal(key_size), dim=-1),
        v_NHV=normal(value_size),
        beta_NH=normal().sigmoid() if has_beta else None,
        decay_NH=-normal().exp(),
    )


@pytest.mark.parametrize("has_beta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_a_chunk_advances_the_state_as_its_tokens_do_one_by_one(num_tokens, has_beta):
    tokens = random_tokens(num_tokens, has_beta=has_beta)
    start = torch.randn(1, 3, 8, 5, generator=torch.Generator().manual_seed(0))
    one_by_one, at_once = start.clone(), start.clone()
    slot = torch.tensor([0])
    expected = [advance_singles(tokens.rows(slice(i, i + 1)), one_by_one, slot) for i in range(num_tokens)]
    found = advance(tokens, at_once[0])
    assert (found - torch.cat(expected)).abs().max() < 1e-5
    assert (at_once - one_by_one).abs().max() < 1e-5


@pytest.mark.parametrize("name", HYBRIDS)
def test_odd_chunk_sizes_and_lengths_equal_transformers(name, tiny, load):
    model = tiny(name)[1]
    for length, chunk_size in ((1, 1), (2, 1), (17, 2), (64, 5), (65, 8), (130, 63), (131, 65), (300, 0)):
        tokens = prompt(length, seed=length)
        logits, output = read(load(name, chunk_size=chunk_size), tokens)
        reference = reference_logits(model, [*tokens, *output.token_ids][:-1])[length - 1 :]
        assert (logits - reference).abs().max() <= TOLERANCE, f"{length} tokens in chunks of {chunk_size}"
        assert output.token_ids == tuple(reference.argmax(-1).tolist())


@pytest.mark.parametrize("name", HYBRIDS)
def test_our_rounding_is_no_worse_than_that_of_transformers(name, tiny, load):
    """Both against float64, over several prompts: a part of ours that lost digits would show here first."""
    model = tiny(name)[1]
    ours, theirs = [], []
    for length in (33, 64, 65, 66, 129, 257):
        tokens = prompt(length, seed=length)
        logits, output = read(load(name, chunk_size=0), tokens, max_tokens=32)
        every = [*tokens, *output.token_ids][:-1]
        truth = float64_logits(model, {"input_ids": torch.tensor([every])})[length - 1 :]
        ours.append((logits - truth).square().mean())
        theirs.append((reference_logits(model, every)[length - 1 :] - truth).square().mean())
    assert float(torch.stack(ours).mean().sqrt()) <= 1.25 * float(torch.stack(theirs).mean().sqrt())


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_second_question_starts_at_the_last_checkpoint(name, load):
    document = prompt(900)
    first, second = [*document, *prompt(20, seed=2)], [*document, *prompt(25, seed=3)]
    cold, cold_output = read(load(name, chunk_size=128), second)
    engine = load(name, chunk_size=128)
    read(engine, first)
    warm, warm_output = read(engine, second)
    assert cold_output.num_cached_tokens == 0
    assert warm_output.num_cached_tokens == warm_output.chunks[0].start == 896
    assert warm_output.token_ids == cold_output.token_ids
    assert (warm - cold).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3-5", "granite-hybrid"])
def test_after_eviction_a_document_is_read_again(name, load):
    document, question = prompt(700), prompt(25, seed=3)
    _, cold = read(load(name, chunk_size=0), [*document, *question])
    engine = load(name, chunk_size=64, max_checkpoints=4)
    saved = []
    for num_others in (0, 1, 2):
        read(engine, document)
        for seed in range(num_others):
            read(engine, prompt(300, seed=10 + seed))
        _, warm = read(engine, [*document, *question])
        assert warm.token_ids == cold.token_ids
        saved.append(warm.num_cached_tokens)
        engine.scheduler.check()
    # The first question went on behind the last whole block of the document, so that the second finds a state there.
    assert saved == [640, 688, 0], "the checkpoints of one more document fit, those of two do not"


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [*((name, 40) for name in ALWAYS), ("lfm2", 7), ("falcon-h1", 40), ("qwen3-5", 7), ("bamba", 7)],
)
def test_a_prompt_cancelled_after_any_chunk_resumes_at_the_checkpoint_before_it(name, chunk_size, load):
    tokens = prompt(150 if chunk_size > BLOCK else 40)
    _, expected = read(load(name, chunk_size=0), tokens)
    num_chunks = load(name, chunk_size=chunk_size).plan(len(tokens)).num_chunks
    for num_read in range(1, num_chunks):
        engine = load(name, chunk_size=chunk_size)
        events = engine.stream(tokens, max_tokens=NUM_GENERATED, ignore_eos=True)
        reached = [next(events).num_computed for _ in range(num_read)][-1]
        events.close()
        _, resumed = read(engine, tokens)
        assert resumed.num_cached_tokens == reached // BLOCK * BLOCK
        assert resumed.token_ids == expected.token_ids
        engine.scheduler.check()


@pytest.mark.parametrize("name", HYBRIDS)
def test_prompts_that_fight_for_a_tiny_pool_give_what_each_gives_alone(name, load):
    prompts = [prompt(length, seed=length) for length in (90, 70, 230)]
    alone = [read(load(name, chunk_size=0), tokens)[1].token_ids for tokens in prompts]
    engine = load(name, chunk_size=24, context=272, max_running=1)  # blocks for one of them
    scheduler = engine.scheduler
    scheduler.limits = dataclasses.replace(scheduler.limits, max_running=3)
    scheduler.holdings.states = StatePool(num_running=3, num_checkpoints=4)
    together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
    assert [output.token_ids for output in together] == alone
    assert engine.scheduler.num_preemptions > 0
    restarts = [after.start for before, after in itertools.pairwise(together[2].chunks) if after.start < before.end]
    assert restarts == [0], "its blocks went to the others, and it was read again"
    question = [*prompts[2], *prompt(9, seed=5)]
    cold, warm = read(load(name, chunk_size=0), question)[1], read(engine, question)[1]
    assert warm.num_cached_tokens == 208, "where the last but one chunk of the preempted prompt ended"
    assert warm.token_ids == cold.token_ids
    engine.scheduler.check()


def test_a_failed_step_goes_back_to_the_checkpoint(load):
    tokens = prompt(150)
    _, expected = read(load("qwen3-next", chunk_size=0), tokens)
    engine = load("qwen3-next", chunk_size=32)
    request = engine.submit(tokens, max_tokens=NUM_GENERATED, ignore_eos=True)
    engine.step()
    run = engine.model.lane.run
    engine.model.lane.run = fail_after(run)
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    engine.model.lane.run = run
    outputs = [event.output for event in engine.events(request) if hasattr(event, "output")]
    assert outputs[0].token_ids == expected.token_ids


def fail_after(run):
    def failing(inputs):
        run(inputs)
        raise RuntimeError("broken after the states had advanced")

    return failing


def test_what_recurrent_state_changes_is_said_and_refused_under_strict(load):
    plan = load("qwen3-5", chunk_size=40, overlap=3).plan(150)
    assert plan.chunk_size == 32
    assert [a for a in plan.adjustments if "chunk size 40 is 32" in a]
    assert [a for a in plan.adjustments if "overlap 3 is 0" in a]
    assert plan.state_bytes > 0
    with pytest.raises(InvalidSetting, match="multiple of 16"):
        load("qwen3-5", chunk_size=40, strict=True).plan(150)
