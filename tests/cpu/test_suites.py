"""A lane that became slow is flagged, the same code again is not; charts and the command around it."""

import json
import time

import pytest
from typer.testing import CliRunner

from penstock.bench.charts import CHARTS, draw
from penstock.bench.ledger import BenchRun, Fingerprint
from penstock.bench.probes import PROBES
from penstock.bench.samples import Measure, ProbeResult
from penstock.bench.suites import FULL, QUICK, compare_twice, run_suite
from penstock.bench.workbench import BenchSettings, Workbench
from penstock.cli.main import app
from penstock.cli.suites import SUITES
from penstock.trace.document import Trace

SIZES = QUICK.model_copy(
    update={
        "repeats": 5,
        "least_seconds": 0.0,
        "prompt_lengths": (128, 256, 512),
        "memory_lengths": (512,),
        "sweep_tokens": 512,
        "beside_tokens": 512,
        "num_turns": 5,
        "reopen_tokens": 512,
    }
)


@pytest.fixture
def settings(tiny):
    return BenchSettings(model=str(tiny("llama")[0]), dtype="float32", threads=1)


class CountedSeconds:
    """A clock for which nothing takes time but the steps of a lane."""

    def __init__(self, *, token_s):
        self.now_s, self.token_s, self.pause_s = 0.0, token_s, 0.0

    def __call__(self):
        self.now_s += 1e-6  # nothing divides by a time that is 0
        return self.now_s

    def counts(self, lane):
        """From now on the steps of that lane take their time on this clock."""
        run = lane.run

        def counted(inputs):
            self.now_s += self.token_s * len(inputs.ids_T) + self.pause_s
            return run(inputs)

        lane.run = counted


@pytest.fixture
def clock(monkeypatch):
    clock = CountedSeconds(token_s=0.001)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_slowed_lane_is_flagged(settings, clock):
    with Workbench(settings, SIZES) as bench:
        clock.counts(bench.engine._runner.lane)
        before = run_suite("prompt-scaling", bench)
        clock.pause_s = 10 * before.probes[0].measure("penstock", "read_s", 512).median
        report = compare_twice(before, run_suite("prompt-scaling", bench), bench)
    assert report.is_worse
    flagged = report.comparison.flagged
    assert {change.verdict for change in flagged} == {"slower"}
    assert {change.x for change in flagged} == {128, 256, 512}
    assert len(report.run.probes[0].measure("penstock", "read_s", 512).samples) == 2 * SIZES.repeats


def test_the_same_times_again_are_not_flagged(settings, clock):
    with Workbench(settings, SIZES) as bench:
        clock.counts(bench.engine._runner.lane)
        before = run_suite("prompt-scaling", bench)
        bench.engine.forget_prefixes()
        report = compare_twice(before, run_suite("prompt-scaling", bench), bench)
    assert not report.is_worse
    assert report.comparison.flagged == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_runs_of_the_same_code_are_not_flagged(settings):
    """With the clock of the machine, which has to be quiet."""
    before, flagged = None, []
    for _ in range(10):
        with Workbench(settings, SIZES.model_copy(update={"least_seconds": QUICK.least_seconds})) as bench:
            run = run_suite("quick", bench)
            if before is not None:
                flagged += [change.name for change in compare_twice(before, run, bench).comparison.flagged]
            before = run
    assert flagged == []


def test_the_command_knows_every_suite():
    assert list(SUITES) == ["quick", "full", *PROBES]


def test_the_command_keeps_and_compares_runs(settings, tmp_path):
    arguments = ["bench", "warm-ttft", "--model", settings.model, "--threads", "1", "--dtype", "float32", "--json"]
    reports = []
    for _ in range(2):
        places = ["--ledger", str(tmp_path / "ledger"), "--trace", str(tmp_path / "trace.json")]
        shown = CliRunner().invoke(app, [*arguments, *places], catch_exceptions=False)
        assert shown.exit_code in (0, 1), shown.output
        reports.append(json.loads(shown.stdout))
    first, second = reports
    assert first["comparison"] is None
    assert second["comparison"]["before"] == first["run"]["started_at"]
    assert [change["quantity"] for change in second["comparison"]["changes"]] == ["ttft_s"]
    (ledger,) = (tmp_path / "ledger").iterdir()
    assert [json.loads(line) for line in ledger.read_text().splitlines()] == [first["run"], second["run"]]
    (measure,) = second["run"]["probes"][0]["measures"]
    assert len(measure["samples"]) >= 3 * FULL.repeats
    num_warm = len(Trace.read(tmp_path / "trace.json").requests) - len(measure["samples"])
    assert num_warm in (2, 3)  # a warm engine, and a warm prompt for each measurement


def test_an_unknown_peer_is_refused_before_anything_is_measured(tmp_path):
    refused = CliRunner().invoke(app, ["bench", "quick", "--peers", "vllm", "--ledger", str(tmp_path)])
    assert "'vllm'" in str(refused.exception)
    assert list(tmp_path.iterdir()) == []


def run_of(name):
    """Plausible samples in the shape of the probe."""
    shapes = {
        "memory": [(variant, "peak_bytes", x) for variant in ("penstock, whole", "peer") for x in (1024, 16384)],
        "prompt-scaling": [("penstock", "read_s", x) for x in (128, 16384)],
        "output-scaling": [("penstock", "write_s", x) for x in (16, 256)],
        "chunk-sweep": [("penstock", quantity, x) for quantity in ("read_s", "peak_bytes") for x in (0, 64, 4096)],
        "concurrency": [(variant, "gap_s", None) for variant in ("target 150 ms", "whole prompt")],
        "chat-growth": [
            (variant, "ttft_s", turn) for variant in ("prefix kept", "read again") for turn in range(1, 21)
        ],
    }
    measures = tuple(
        Measure(variant=variant, quantity=quantity, x=x, samples=(1.0, 1.2, 1.5))
        for variant, quantity, x in shapes[name]
    )
    result = ProbeResult(name=name, axis=None, seed=0, seconds=1.0, yardstick_s=(1.0,), measures=measures)
    return BenchRun(
        suite=name,
        started_at="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        fingerprint=Fingerprint.of_this_machine(),
        versions={},
        model_identity="m",
        settings=BenchSettings(),
        sizes=SIZES,
        probes=(result,),
    )


@pytest.mark.parametrize("name", CHARTS)
def test_charts_begin_at_zero(name, tmp_path, monkeypatch):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    run = run_of(name)
    (path,) = draw(run, tmp_path)
    assert BenchRun.model_validate_json(path.with_suffix(".json").read_text()) == run
    assert path.read_bytes().startswith(b"\x89PNG")
    for axis in figures[0].axes:
        assert axis.get_ylabel() or name == "concurrency"
        is_amount_below = name == "concurrency"
        assert (axis.get_xlim() if is_amount_below else axis.get_ylim())[0] == 0


def test_a_run_says_by_which_command_it_is_measured_again():
    assert run_of("memory").command == "penstock bench memory"
    settings = BenchSettings(peers=("transformers", "llama.cpp"), threads=2)
    again = run_of("memory").model_copy(update={"settings": settings})
    assert again.command == "penstock bench memory --peers transformers,llama.cpp --threads 2"


def test_every_chart_belongs_to_a_probe():
    assert set(CHARTS) <= set(PROBES)
