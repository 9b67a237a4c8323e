"""Every probe on a tiny model: what it measures is there, sample by sample, and is what its name says."""

import pytest

from penstock.bench.probes import PROBES, stalls
from penstock.bench.work import SHAPES
from penstock.bench.workbench import OWN, BenchSettings, ProbeSizes, Workbench
from penstock.config import PrefillPriority

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


def check_start_up(result):
    assert result.variants("wall_s") == ["penstock --help", "penstock plan"]
    assert min(result.measure("penstock plan", "wall_s").samples) > 0.01, "a process was started"


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
    "start-up": check_start_up,
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


def test_an_engine_that_is_loaded_already_is_probed_and_stays_open(load):
    engine = load()
    with Workbench.over(engine, SIZES) as bench:
        assert len(PROBES["warm-ttft"](bench).measure(OWN, "ttft_s", 20).samples) == 3 * SIZES.repeats
        assert bench.prompt(50, "same") == bench.prompt(50, "same") != bench.prompt(50, "other")
    assert engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids


def test_random_weights_are_probed():
    settings = BenchSettings(model="tiny", dtype="float32", threads=1)
    with Workbench(settings, SIZES, shape=SHAPES["tiny"], memory="4GiB") as bench:
        assert [measure.x for measure in PROBES["output-scaling"](bench).series(OWN, "write_s")] == [4, 40]
    assert not hasattr(bench.engine, "model"), "it is closed with its workbench"


def test_stalls_are_measured_under_every_priority_and_without_chunks(tiny):
    settings = BenchSettings(model=str(tiny("llama")[0]), dtype="float32", threads=1)
    sizes = ProbeSizes(num_streams=2, beside_tokens=400, latency_target_ms=50)
    found = list(stalls(settings, sizes, 60))
    assert [result.name for result in found] == [
        *(f"{priority.value}, target 50 ms" for priority in PrefillPriority),
        *("interleaved, chunks of 1024, no target", "chunking off"),
    ]
    for result in found:
        assert result.num_read == 400
        assert result.num_gaps >= 2, "each stream has a gap, if only the whole wait"
        assert 0 < result.gap_p50_ms <= result.gap_p99_ms <= result.gap_max_ms <= 1e3 * result.seconds * 1.001


def test_a_prompt_that_time_runs_out_for_is_told_as_far_as_it_was_read(tiny):
    settings = BenchSettings(model=str(tiny("llama")[0]), dtype="float32", threads=1)
    sizes = ProbeSizes(num_streams=2, beside_tokens=2000, latency_target_ms=50)
    *in_chunks, whole = stalls(settings, sizes, 1e-6)  # one step each
    assert all(result.num_read < 2000 and result.num_gaps == 2 for result in in_chunks)
    assert (whole.name, whole.num_read) == ("chunking off", 2000)
