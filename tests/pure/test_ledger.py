"""Runs are kept per machine and compared with the last of the same work; only a change beyond the noise is one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.changes import FLOORS, compare, confirm
from penstock.bench.ledger import BenchRun, Fingerprint, Ledger
from penstock.bench.samples import Measure, ProbeResult
from penstock.bench.suites import QUICK
from penstock.bench.workbench import BenchSettings
from penstock.errors import InvalidSetting

MACHINE = Fingerprint(processor="one", num_cores=2, memory_gib=24, gpus=(), system="Linux x86_64")
OTHER_MACHINE = MACHINE.model_copy(update={"processor": "another"})


def probe(*measures, name="prompt-scaling", yardstick=(0.01, 0.01)):
    return ProbeResult(
        name=name, axis="prompt tokens", seed=0, seconds=1.0, yardstick_s=tuple(yardstick), measures=measures
    )


def measure(*samples, quantity="read_s", x=128, variant="penstock"):
    return Measure(variant=variant, quantity=quantity, x=x, samples=samples)


def run(*probes, fingerprint=MACHINE, suite="quick", started_at="2026-01-01T00:00:00+00:00", **settings):
    return BenchRun(
        suite=suite,
        started_at=started_at,
        seconds=1.0,
        fingerprint=fingerprint,
        versions={"penstock": "0.1.0"},
        model_identity="m",
        settings=BenchSettings(**settings),
        sizes=QUICK,
        probes=probes,
    )


def verdicts(before, after):
    return [change.verdict for change in compare(before, after).changes]


times = st.lists(st.floats(1e-4, 1e3), min_size=5, max_size=8)


@given(times)
def test_a_run_never_differs_from_itself(samples):
    one = run(probe(measure(*samples), measure(*samples, quantity="peak_bytes")))
    assert compare(one, one).flagged == []


@given(times, times, times)
def test_what_is_slower_one_way_is_faster_the_other_way(first, second, third):
    a, b = (run(probe(measure(*of_a), measure(*third, x=512))) for of_a in (first, second))
    opposite = {"slower": "faster", "faster": "slower", "same": "same"}
    assert verdicts(b, a) == [opposite[verdict] for verdict in verdicts(a, b)]


@given(times, times, st.randoms())
def test_the_order_of_samples_does_not_matter(first, second, generator):
    shuffled = generator.sample(second, len(second))
    before = run(probe(measure(*first)))
    assert verdicts(before, run(probe(measure(*second)))) == verdicts(before, run(probe(measure(*shuffled))))


@given(st.floats(0.02, 1e3), st.floats(0.0, 0.02), st.floats(1.2, 10.0))
def test_a_change_beyond_the_spread_is_flagged(seconds, noise, factor):
    samples = [seconds * (1 + noise * share) for share in (0.0, 0.2, 0.4, 0.9, 1.0)]
    before, after = (run(probe(measure(*(f * s for s in samples)))) for f in (1.0, factor))
    assert verdicts(before, after) == ["slower"]
    assert verdicts(after, before) == ["faster"]


@given(times, st.floats(1.0, 1 + FLOORS["s"] * 0.99))
def test_nothing_under_the_floor_is_a_change(samples, factor):
    before, after = (run(probe(measure(*(f * s for s in samples)))) for f in (1.0, factor))
    assert verdicts(before, after) == ["same"]


@given(times, st.floats(1.0, 20.0))
def test_a_machine_that_others_slow_down_is_no_change(samples, factor):
    before = run(probe(measure(*samples)))
    after = run(probe(measure(*(factor * s for s in samples)), yardstick=(0.01 * factor, 0.01 * factor)))
    assert verdicts(before, after) == verdicts(after, before) == ["same"]


@given(st.floats(1e-5, 2e-3))
def test_less_than_half_a_millisecond_is_no_change(seconds):
    before = run(probe(measure(*[seconds] * 5)))
    assert verdicts(before, run(probe(measure(*[seconds + 0.0004] * 5)))) == ["same"]
    assert verdicts(before, run(probe(measure(*[2 * seconds + 0.001] * 5)))) == ["slower"]


def test_a_yardstick_that_became_faster_hides_nothing():
    before = run(probe(measure(1.0, 1.01, 1.02, 1.03, 1.5)))
    assert verdicts(before, run(probe(measure(1.6, 1.61, 1.62, 1.63, 1.64), yardstick=(0.001, 0.001)))) == ["slower"]


def test_memory_is_compared_by_one_sample_and_times_are_not():
    before = run(probe(measure(600e6, quantity="peak_bytes"), measure(1.0)))
    after = run(probe(measure(900e6, quantity="peak_bytes"), measure(9.0)))
    assert verdicts(before, after) == ["larger", "same"]
    # What the machine did has no part in how much memory is taken.
    slow = run(probe(measure(900e6, quantity="peak_bytes"), measure(1.0), yardstick=(0.1, 0.1)))
    assert verdicts(before, slow) == ["larger", "same"]


def test_a_usually_noisy_probe_raises_the_limit_of_a_quiet_measure():
    noisy = [measure(1.0, 1.1, 1.4, 1.5, 1.6, x=length) for length in (256, 512, 1024)]
    before = run(probe(measure(*[1.0] * 5), *noisy))
    after = run(probe(measure(*[1.3] * 5), *noisy))
    assert verdicts(before, after) == ["same"] * 4


def shaken(generator, noise, share_disturbed=0.0):
    """A sample of 1 with the noise of a machine, at times disturbed by others for as long as it takes or longer."""
    is_disturbed = generator.random() < share_disturbed
    return generator.lognormvariate(0, noise) * (1 + is_disturbed * generator.expovariate(1))


def shaken_run(generator, noise, share_disturbed=0.0, factor=1.0):
    measures = (
        measure(*(factor * shaken(generator, noise, share_disturbed) for _ in range(5)), x=x) for x in range(10)
    )
    return run(probe(*measures))


@pytest.mark.parametrize(("noise", "share_disturbed"), [(0.02, 0.0), (0.1, 0.0), (0.4, 0.0), (0.02, 0.35)])
def test_runs_of_one_code_are_not_told_apart(noise, share_disturbed):
    """Five hundred comparisons of ten measures; what is found is measured again, as the command does."""
    generator = random.Random(0)
    flagged = []
    for _ in range(500):
        before, after = (shaken_run(generator, noise, share_disturbed) for _ in range(2))
        found = compare(before, after)
        if found.flagged:
            again = compare(before, shaken_run(generator, noise, share_disturbed))
            flagged += confirm(found, again).flagged
    assert not any(change.is_worse for change in flagged)
    # An earlier run that was disturbed all along makes any later one look better.
    assert len(flagged) <= (5 if share_disturbed else 0)  # of 5,000


@pytest.mark.parametrize("share_disturbed", [0.0, 0.2])
def test_a_quarter_is_found(share_disturbed):
    generator = random.Random(0)
    found = []
    for _ in range(20):
        before, after = (shaken_run(generator, 0.015, share_disturbed, factor) for factor in (1.0, 1.25))
        found += verdicts(before, after)
    assert found.count("slower") >= 0.8 * len(found)


def test_only_what_is_found_twice_is_said():
    before = run(probe(measure(*[1.0] * 5), measure(*[1.0] * 5, x=512)))
    found = compare(before, run(probe(measure(*[2.0] * 5), measure(*[2.0] * 5, x=512))))
    again = compare(before, run(probe(measure(*[2.0] * 5), measure(*[1.0] * 5, x=512))))
    assert [change.verdict for change in found.changes] == ["slower", "slower"]
    assert [change.verdict for change in confirm(found, again).changes] == ["slower", "same"]
    assert confirm(found, compare(before, run())).flagged == []


def test_the_ledger_finds_the_last_run_of_the_same_work(tmp_path):
    ledger = Ledger(tmp_path / "new" / "folder")
    now = run(probe(measure(1.0)))
    assert ledger.last_like(now) is None
    ledger.append(run(started_at="1"))
    ledger.append(run(started_at="2"))
    ledger.append(run(started_at="3", model="another"))
    ledger.append(run(started_at="4", suite="full"))
    ledger.append(run(started_at="5", fingerprint=OTHER_MACHINE))
    assert ledger.last_like(now).started_at == "2"
    assert [old.started_at for old in ledger.runs(MACHINE)] == ["1", "2", "3", "4"]
    assert len(list(ledger.folder.iterdir())) == 2


def test_lines_of_another_version_are_kept_and_left_out(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.append(run())
    path = ledger.path(MACHINE)
    path.write_text('{"format": 99}\n' + path.read_text() + "half a li")
    assert len(ledger.runs(MACHINE)) == 1
    assert '"format": 99' in path.read_text()


def test_a_ledger_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSetting, match="--ledger"):
        Ledger(tmp_path / "file").append(run())


@given(times, st.sampled_from(["read_s", "peak_bytes", "unread_tokens"]), st.none() | st.integers(0, 10**6))
def test_what_is_written_is_read_back_equal(samples, quantity, x):
    one = run(probe(measure(*samples, quantity=quantity, x=x)))
    assert BenchRun.model_validate_json(one.model_dump_json()) == one


def test_this_machine_has_one_fingerprint():
    here = Fingerprint.of_this_machine()
    assert here == Fingerprint.of_this_machine()
    assert here.num_cores >= 1
    assert here.key != MACHINE.key
