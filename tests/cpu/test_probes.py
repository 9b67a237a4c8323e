"""Every probe on a tiny model: what it measures is there, sample by sample, and is what its name says."""

import pytest

from penstock.bench.probes import PROBES
from penstock.bench.workbench import OWN, BenchSettings, ProbeSizes, Workbench

SIZES = ProbeSizes(
    repeats=2,
    ttft_tokens=20,
    prompt_lengths=(30, 240),
    output_lengths=(4, 40),
    sweep_tokens=200,
    chunk_sizes=(0, 16),
    memory_lengths=(100,),
    num_streams=2,
    beside_tokens=400,
    latency_target_ms=50,
    num_turns=4,
    turn_tokens=40,
    answer_tokens=2,
    reopen_tokens=320,
)


@pytest.fixture(scope="module")
def bench(tiny):
    settings = BenchSettings(model=str(tiny("llama")[0]), dtype="float32", threads=1, seed=7)
    with Workbench(settings, SIZES) as bench:
        yield bench


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_reports_all_its_samples(bench, name):
    result = PROBES[name](bench)
    assert (result.name, result.seed) == (name, 7)
    assert len(result.yardstick_s) >= 2
    for measure in result.measures:
        is_once = measure.unit == "bytes"
        assert len(measure.samples) >= (1 if is_once else SIZES.repeats)
        assert all(sample > 0 for sample in measure.samples)
    assert type(result).model_validate_json(result.model_dump_json()) == result
    CHECKS[name](result)


def check_cold_load(result):
    loads, first_tokens = result.measure(OWN, "load_s"), result.measure(OWN, "first_token_s")
    assert all(load < first for load, first in zip(loads.samples, first_tokens.samples, strict=True))


def check_warm_ttft(result):
    assert len(result.measure(OWN, "ttft_s", 20).samples) == 3 * SIZES.repeats


def check_prompt_scaling(result):
    assert [measure.x for measure in result.series(OWN, "read_s")] == [30, 240]


def check_output_scaling(result):
    short, long = result.series(OWN, "write_s")
    assert (short.x, long.x) == (4, 40)
    assert min(long.samples) > min(short.samples)


def check_chunk_sweep(result):
    assert [measure.x for measure in result.series(OWN, "read_s")] == [0, 16]
    assert [measure.x for measure in result.series(OWN, "peak_bytes")] == [0, 16]


def check_memory(result):
    assert result.variants("peak_bytes") == ["penstock, in chunks", "penstock, whole"]


def check_concurrency(result):
    assert result.variants("ttft_s") == ["target 50 ms", "chunks of 1024", "whole prompt"]
    gaps = result.measure("target 50 ms", "gap_s")
    assert not gaps.is_compared
    assert max(gaps.samples) == max(result.measure("target 50 ms", "longest_gap_s").samples)


def check_chat_growth(result):
    for variant in ("prefix kept", "read again"):
        assert [measure.x for measure in result.series(variant, "ttft_s")] == [1, 2, 3, 4]
    assert result.measure("read again", "unread_tokens", 4).samples == (166.0, 166.0)  # 4 turns and 3 answers
    assert max(result.measure("prefix kept", "unread_tokens", 4).samples) <= 40 + 2 + 16  # what is new, and a block


def check_reopen(result):
    unread = result.measure("after a cancel", "unread_tokens", 320)
    assert set(unread.samples) == {160.0}


CHECKS = {
    "cold-load": check_cold_load,
    "memory": check_memory,
    "warm-ttft": check_warm_ttft,
    "prompt-scaling": check_prompt_scaling,
    "output-scaling": check_output_scaling,
    "chunk-sweep": check_chunk_sweep,
    "concurrency": check_concurrency,
    "chat-growth": check_chat_growth,
    "reopen": check_reopen,
}
