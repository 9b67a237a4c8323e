"""Times calls on this GPU by recording them and replaying the recording, so that the host is not measured."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replayed_us(run: Callable[[int], object], *, num_calls: int, num_replays: int) -> list[float]:
    """Microseconds of one call, by each replay; `run` is given the number of the call in the recording."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(num_calls):
            run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_calls):
            run(index)
    graph.replay()
    times = []
    for _ in range(num_replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return times
