"""What agents ask turn after turn: the cache finds nearly all of it, and a turn costs what its own tokens cost."""

import os
from statistics import median

import pytest
from real_weights import real_file
from tiny_chat_model import save_tiny_chat_model

from penstock.engine.engine import Engine
from penstock.prompt.random_tokens import random_tokens
from penstock.request import SamplingParams

pytestmark = [pytest.mark.evidence, pytest.mark.long, pytest.mark.timeout(7200)]
NUM_PREFIX = int(os.environ.get("PENSTOCK_REPLAY_PREFIX", "20000"))
NUM_TURNS = int(os.environ.get("PENSTOCK_REPLAY_TURNS", "40"))
NUM_RESULT, NUM_WRITTEN = 226, 24  # tokens of a turn: the result of a call, and the next answer
LEAST_FOUND = 0.98
MOST_LATER = 1.3
VOCABULARY = 40_000


class Agents:
    """Conversations on one engine; every request is held against the longest prefix that one before it had."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.block_size = engine.config.block_size
        self.shares: list[float] = []
        self._seen: list[list[int]] = []
        self._num_drawn = 0

    def drawn(self, num_tokens: int) -> list[int]:
        self._num_drawn += 1
        return random_tokens(num_tokens, self._num_drawn, end=VOCABULARY)

    def ask(self, prompts, *, num_written=NUM_WRITTEN, forks=()):
        """The outputs of prompts that are asked at once."""
        expected = [self._num_known(prompt) for prompt in prompts]
        params = SamplingParams(max_tokens=num_written, temperature=0, ignore_eos=True)
        outputs = self.engine.generate_batch(prompts, params=params, forks=forks)
        for prompt, output, num_known in zip(prompts, outputs, expected, strict=True):
            if num_known:
                self.shares.append(output.num_cached_tokens / num_known)
            self._seen.append([*prompt, *output.token_ids])
        return outputs

    def _num_known(self, prompt):
        longest = max((common(prompt, one) for one in self._seen), default=0)
        return min(longest, len(prompt) - 1) // self.block_size * self.block_size


def common(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture
def coder():
    with Engine.load(real_file("qwen2.5-coder-0.5b"), memory="4GiB") as engine:
        engine.warm_up()
        yield engine


def test_turns_are_found(coder):
    """With a title between turns, and with a second agent beside the first."""
    agents = Agents(coder)
    prefix, second = agents.drawn(NUM_PREFIX), None
    talk = [*prefix, *agents.drawn(50)]
    for turn in range(NUM_TURNS):
        if turn == NUM_TURNS // 2:  # another agent with the same tools and system prompt
            second = [*prefix, *agents.drawn(80)]
        talks = [talk] if second is None else [talk, second]
        outputs = agents.ask(talks)
        if turn % 4 == 1:
            agents.ask([agents.drawn(300)], num_written=8)  # a title, with a prompt of its own
        talk, *others = [
            [*one, *out.token_ids, *agents.drawn(NUM_RESULT)] for one, out in zip(talks, outputs, strict=True)
        ]
        second = others[0] if others else None
    least, middle = min(agents.shares), median(agents.shares)
    print(f"\n{NUM_TURNS} turns after {NUM_PREFIX} tokens, {len(talk)} in the last prompt, {len(agents.shares)} warm,")
    print(f"of the whole blocks that an earlier one had, found at least {least:.4f}, median {middle:.4f}")
    assert min(agents.shares) >= LEAST_FOUND


def test_the_first_token_of_a_turn_costs_what_its_tokens_cost(coder):
    """Against the same number of tokens as the second chunk of one request, at the same context."""
    agents = Agents(coder)
    talk = agents.drawn(NUM_PREFIX)
    agents.ask([talk], num_written=1)
    ratios = []
    for _ in range(6):
        known = len(talk) // agents.block_size * agents.block_size
        talk = [*talk[:known], *agents.drawn(256)]
        (warm,) = agents.ask([talk], num_written=1)
        probe = [*talk[:known], *agents.drawn(512)]
        params = SamplingParams(max_tokens=1, temperature=0)
        control = coder.generate(probe, params=params, chunk_size=256)
        assert [chunk.end - chunk.start for chunk in control.chunks] == [256, 256]
        ratios.append(warm.ttft_s * 1000 / control.chunks[-1].ms)
        print(
            f"\nfirst token after {warm.ttft_s * 1000:.0f} ms, the chunk alone {control.chunks[-1].ms:.0f} ms", end=""
        )
    print(f"\n256 tokens behind {len(talk)}: first token {median(ratios):.3f} times the chunk")
    assert median(ratios) <= MOST_LATER


def test_a_hybrid_goes_on_where_the_tail_is_shifted(tmp_path):
    """Of the prompt up to the place where prompts part, which the server finds and names."""
    folder = tmp_path / "hybrid"
    folder.mkdir()
    save_tiny_chat_model(folder, max_tokens=32768, is_hybrid=True)
    with Engine.load(str(folder), memory="3GiB", dtype="float32") as engine:
        agents = Agents(engine)
        prefix, tail = agents.drawn(NUM_PREFIX), agents.drawn(600)
        forks = [len(prefix)]
        agents.ask([[*prefix, *tail]], forks=forks)
        for _ in range(5):
            agents.ask([[*prefix, *agents.drawn(100), *tail]], forks=forks)
        talk = [*prefix, *agents.drawn(50)]
        for _ in range(NUM_TURNS):
            (out,) = agents.ask([talk], forks=forks)
            talk = [*talk, *out.token_ids, *agents.drawn(NUM_RESULT)]
    print(
        f"\na hybrid, {NUM_PREFIX} tokens before a tail shifted by 100, then {NUM_TURNS} turns: found at least "
        f"{min(agents.shares):.4f}, median {median(agents.shares):.4f}"
    )
    assert min(agents.shares) >= LEAST_FOUND
