"""Named, seeded measurements. Each round goes through all variants, so that noise hits them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from random import Random

from penstock.bench.peers import Reader, ReaderSettings
from penstock.bench.samples import ProbeResult, Samples
from penstock.bench.stalls import read_beside
from penstock.bench.workbench import OWN, Workbench
from penstock.errors import PenstockError
from penstock.request import Output

STREAM_CONTEXT = 100
MOST_SECONDS_BESIDE = 300.0
MOST_ROUNDS = 100


class Measuring:
    """A probe while it runs."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.samples = Samples()
        self.yardstick_s: list[float] = []
        self.started = time.perf_counter()

    def rounds(self, fewest: int | None = None) -> Iterator[int]:
        """Until the probe has lasted for a while: a neighbour that is busy for a second hits some samples, not all."""
        fewest = fewest or self.bench.sizes.repeats
        least_s = self.bench.sizes.least_seconds
        most = range(max(fewest, MOST_ROUNDS))
        yield from self._between_yardsticks(takewhile(lambda index: index < fewest or self._seconds < least_s, most))

    def once(self) -> Iterator[int]:
        yield from self._between_yardsticks(range(1))

    def _between_yardsticks(self, rounds: Iterable[int]) -> Iterator[int]:
        for index in rounds:
            self.yardstick_s.append(self.bench.yardstick())
            yield index
        self.yardstick_s.append(self.bench.yardstick())

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def result(self, name: str, axis: str | None = None) -> ProbeResult:
        return ProbeResult(
            name=name,
            axis=axis,
            seed=self.bench.settings.seed,
            seconds=self._seconds,
            yardstick_s=tuple(self.yardstick_s),
            measures=self.samples.measures(),
        )


def cold_load(bench: Workbench) -> ProbeResult:
    """A process that starts, loads the model and writes one token."""
    probe, prompt = Measuring(bench), bench.prompt(bench.sizes.ttft_tokens)
    context = bench.sizes.ttft_tokens + 64
    readers = [bench.own_reader(OWN, context=context, chunk_size=None), *bench.peer_readers(context)]
    for _ in probe.rounds():
        for settings in readers:
            started = time.perf_counter()
            with Reader(settings) as reader:
                reader.read(prompt)
                probe.samples.note(settings.name, "first_token_s", time.perf_counter() - started)
                probe.samples.note(settings.name, "load_s", reader.loaded.load_s)
    return probe.result("cold-load")


def warm_ttft(bench: Workbench) -> ProbeResult:
    """From a short prompt to its first token, on an engine that is ready."""
    probe, length = Measuring(bench), bench.sizes.ttft_tokens
    bench.write(bench.prompt(length, "warm"))
    for index in probe.rounds(3 * bench.sizes.repeats):
        probe.samples.note(OWN, "ttft_s", _ttft_s(bench.write(bench.prompt(length, "ttft", index))), length)
    return probe.result("warm-ttft", "prompt tokens")


def prompt_scaling(bench: Workbench) -> ProbeResult:
    """Time to read, against the length of the prompt."""
    probe, lengths = Measuring(bench), bench.sizes.prompt_lengths
    with bench.peers(max(lengths) + 64) as readers:
        for reader in readers:
            reader.read(bench.prompt(min(lengths), "warm"))
        bench.write(bench.prompt(min(lengths), "warm"))
        for index in probe.rounds():
            for length in lengths:
                prompt = bench.prompt(length, "scaling", index)
                probe.samples.note(OWN, "read_s", _ttft_s(bench.write(prompt)), length)
                for reader in readers:
                    probe.samples.note(reader.settings.name, "read_s", reader.read(prompt).read_s, length)
    return probe.result("prompt-scaling", "prompt tokens")


def output_scaling(bench: Workbench) -> ProbeResult:
    """Time to write, against the length of the answer. The first token counts as read."""
    probe, sizes = Measuring(bench), bench.sizes
    with bench.peers(sizes.ttft_tokens + max(sizes.output_lengths) + 64) as readers:
        for index in probe.rounds():
            for length in sizes.output_lengths:
                prompt = bench.prompt(sizes.ttft_tokens, "output", length, index)
                probe.samples.note(OWN, "write_s", bench.write(prompt, length + 1).decode_s, length)
                for reader in readers:
                    probe.samples.note(reader.settings.name, "write_s", reader.read(prompt, length + 1).write_s, length)
    return probe.result("output-scaling", "written tokens")


def chunk_sweep(bench: Workbench) -> ProbeResult:
    """Time and peak of one prompt, against the chunk size; 0 is the whole prompt in one chunk."""
    probe, length = Measuring(bench), bench.sizes.sweep_tokens
    for index in probe.rounds():
        for chunk_size in bench.sizes.chunk_sizes:
            prompt = bench.prompt(length, "sweep", chunk_size, index)
            output = bench.write(prompt, chunk_size=chunk_size)
            probe.samples.note(OWN, "read_s", _ttft_s(output), chunk_size)
    for chunk_size in bench.sizes.chunk_sizes:
        settings = bench.own_reader(OWN, context=length + 64, chunk_size=chunk_size)
        probe.samples.note(OWN, "peak_bytes", _peak_bytes(settings, bench.prompt(length, "sweep")), chunk_size)
    return probe.result("chunk-sweep", "chunk size")


def memory(bench: Workbench) -> ProbeResult:
    """Peak of a fresh process that reads one prompt, against its length."""
    probe = Measuring(bench)
    for _ in probe.once():
        for length in bench.sizes.memory_lengths:
            context = length + 64
            own = (
                bench.own_reader(f"{OWN}, in chunks", context=context, chunk_size=None),
                bench.own_reader(f"{OWN}, whole", context=context, chunk_size=0),
            )
            for settings in (*own, *bench.peer_readers(context)):
                peak_bytes = _peak_bytes(settings, bench.prompt(length, "memory"))
                probe.samples.note(settings.name, "peak_bytes", peak_bytes, length)
    return probe.result("memory", "prompt tokens")


def concurrency(bench: Workbench) -> ProbeResult:
    """Gaps between the tokens of running streams while a long prompt is read beside them."""
    from penstock.engine.calibration import calibrate

    probe, sizes, budget = Measuring(bench), bench.sizes, bench.engine.scheduler.budget
    ceiling, target_s, cost = budget.ceiling, budget.target_s, budget.cost
    budget.cost = cost or calibrate(bench.engine)
    variants = {
        f"target {sizes.latency_target_ms:g} ms": (ceiling, sizes.latency_target_ms / 1e3),
        f"chunks of {ceiling}": (ceiling, None),
        "whole prompt": (0, None),
    }
    probe.samples.only_draw("gap_s")
    try:
        for index in probe.rounds():
            for name, (budget.ceiling, budget.target_s) in variants.items():
                beside = read_beside(
                    bench.engine,
                    num_streams=sizes.num_streams,
                    stream_context=STREAM_CONTEXT,
                    prompt_tokens=sizes.beside_tokens,
                    most_seconds=MOST_SECONDS_BESIDE,
                    generator=Random(f"{bench.settings.seed} {index}"),
                )
                for gap_s in beside.gaps_s:
                    probe.samples.note(name, "gap_s", gap_s)
                if beside.num_read < sizes.beside_tokens:
                    raise PenstockError(
                        f"{name}: {beside.num_read} tokens in {MOST_SECONDS_BESIDE:g} s, not all of them."
                    )
                probe.samples.note(name, "longest_gap_s", max(beside.gaps_s))
                probe.samples.note(name, "ttft_s", beside.seconds)
                bench.forget_prefixes()
    finally:
        budget.ceiling, budget.target_s, budget.cost = ceiling, target_s, cost
    return probe.result("concurrency")


def chat_growth(bench: Workbench) -> ProbeResult:
    """Time to first token of each turn of a conversation, with its earlier turns kept and without."""
    probe, sizes = Measuring(bench), bench.sizes
    for index in probe.rounds():
        for name, keeps_prefixes in (("prefix kept", True), ("read again", False)):
            bench.forget_prefixes()
            conversation: list[int] = []
            for turn in range(1, sizes.num_turns + 1):
                conversation += bench.prompt(sizes.turn_tokens, "turn", turn, index)
                output = bench.write(conversation, sizes.answer_tokens)
                probe.samples.note(name, "ttft_s", _ttft_s(output), turn)
                probe.samples.note(name, "unread_tokens", len(conversation) - output.num_cached_tokens, turn)
                conversation += output.token_ids
                if not keeps_prefixes:
                    bench.forget_prefixes()
    return probe.result("chat-growth", "turn")


def reopen(bench: Workbench) -> ProbeResult:
    """A prompt that was cancelled half-way and comes again, beside the same prompt when it is new."""
    probe, length = Measuring(bench), bench.sizes.reopen_tokens
    for index in probe.rounds():
        prompt = bench.prompt(length, "reopen", index)
        bench.forget_prefixes()
        probe.samples.note("new", "ttft_s", _ttft_s(bench.write(prompt)), length)
        bench.forget_prefixes()
        _cancel_half_way(bench, prompt)
        again = bench.write(prompt)
        probe.samples.note("after a cancel", "ttft_s", _ttft_s(again), length)
        probe.samples.note("after a cancel", "unread_tokens", length - again.num_cached_tokens, length)
    return probe.result("reopen", "prompt tokens")


def _cancel_half_way(bench: Workbench, prompt: list[int]) -> None:
    engine = bench.engine
    # Eight chunks, so that there is a half-way on any machine.
    request_id = engine.submit(prompt, max_tokens=1, chunk_size=max(1, len(prompt) // 8))
    while engine.scheduler.sequences[request_id].num_computed < len(prompt) // 2:
        engine.step()
    engine.abort(request_id)


def _peak_bytes(settings: ReaderSettings, prompt: list[int]) -> int:
    with Reader(settings) as reader:
        return reader.read(prompt, 2).peak_bytes


def _ttft_s(output: Output) -> float:
    assert output.ttft_s is not None, "a request without a token"
    return output.ttft_s


# Those that start fresh processes come first, before this one holds a model.
PROBES: dict[str, Callable[[Workbench], ProbeResult]] = {
    "cold-load": cold_load,
    "memory": memory,
    "warm-ttft": warm_ttft,
    "prompt-scaling": prompt_scaling,
    "output-scaling": output_scaling,
    "chunk-sweep": chunk_sweep,
    "concurrency": concurrency,
    "chat-growth": chat_growth,
    "reopen": reopen,
}
