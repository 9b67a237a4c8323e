import json
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.pace import Pace

LENGTH = 22_124


def seconds_of(start, end, *, slowdown, overhead=0.0):
    """A chunk's, where a token at the end of the prompt takes `slowdown` times one more than at its start."""
    return overhead + (end - start) * (1 + slowdown * (start + end) / 2 / LENGTH) / 1000


def known(slowdown):
    return ((slowdown / LENGTH, inf),)


def read_until(share, *, chunk_size=1024, cached=0, pause_s=0.0, first_s=0.0, noise=None, growth=(), **costs):
    """Finds (what was predicted when that share was read, what the rest took)."""
    pace, elapsed, predicted, rest = Pace(growth=growth), first_s, None, 0.0
    for number, start in enumerate(range(cached, LENGTH, chunk_size)):
        end = min(start + chunk_size, LENGTH)
        seconds = seconds_of(start, end, **costs) * (1 if noise is None else noise[number % len(noise)])
        if predicted is not None:
            rest += seconds + pause_s
            continue
        pace.note(start, end, seconds + (first_s if start == cached else 0))
        elapsed += seconds + pause_s
        if end - cached >= share * (LENGTH - cached) and number:
            predicted = pace.seconds_left(end, LENGTH, elapsed)
    assert predicted is not None
    return predicted, rest


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
@given(
    slowdown=st.floats(0, 20),
    chunk_size=st.sampled_from([16, 100, 256, 1024, 2048]),
    cached=st.sampled_from([0, 64, 4096]),
    pause_s=st.sampled_from([0.0, 0.01]),
)
def test_the_rest_is_predicted_where_cost_grows_with_context(share, slowdown, chunk_size, cached, pause_s):
    predicted, rest = read_until(share, slowdown=slowdown, chunk_size=chunk_size, cached=cached, overhead=0.003)
    assert predicted == pytest.approx(rest, rel=0.2)
    if chunk_size >= 256:  # a pause that is long beside a chunk counts as if it grew too
        predicted, rest = read_until(share, slowdown=slowdown, chunk_size=chunk_size, cached=cached, pause_s=pause_s)
        assert predicted == pytest.approx(rest, rel=0.2)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
@given(slowdown=st.floats(0, 10), noise=st.lists(st.floats(0.97, 1.03), min_size=7, max_size=7))
def test_a_slow_first_chunk_and_noise_do_not_mislead(share, slowdown, noise):
    predicted, rest = read_until(share, slowdown=slowdown, first_s=0.3, noise=noise)
    assert predicted == pytest.approx(rest, rel=0.35)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
@given(slowdown=st.floats(2, 10), noise=st.lists(st.floats(0.9, 1.1), min_size=7, max_size=7))
def test_a_known_shape_keeps_noise_from_misleading_early(share, slowdown, noise):
    predicted, rest = read_until(share, slowdown=slowdown, noise=noise, growth=known(slowdown))
    assert predicted == pytest.approx(rest, rel=0.25)


@given(slowdown=st.floats(1, 10), wrong=st.floats(0.5, 2))
def test_what_was_measured_outweighs_the_shape_in_the_end(slowdown, wrong):
    predicted, rest = read_until(0.7, slowdown=slowdown, growth=known(wrong * slowdown))
    assert predicted == pytest.approx(rest, rel=0.1)


@pytest.mark.parametrize("slowdown", [1.0, 7.0])
def test_one_chunk_is_enough_where_the_shape_is_known(slowdown):
    pace, first, rest = Pace(growth=known(slowdown)), (0, 1024), (1024, LENGTH)
    pace.note(*first, seconds_of(*first, slowdown=slowdown))
    left = pace.seconds_left(1024, LENGTH, seconds_of(*first, slowdown=slowdown))
    assert left == pytest.approx(seconds_of(*rest, slowdown=slowdown), rel=0.01)


def test_a_window_stops_to_cost_more_where_it_is_full():
    def seconds(start, end):  # two thirds of the layers see 1,000 positions, the others all
        return sum(1 + 2 * min(position, 1000) / 1000 + position / 1000 for position in range(start, end))

    windows = Pace(growth=((2 / 1000, 1000), (1 / 1000, inf)))
    windows.note(0, 500, seconds(0, 500))
    assert windows.seconds_left(500, 8000, seconds(0, 500)) == pytest.approx(seconds(500, 8000), rel=0.01)
    without = Pace(growth=((3 / 1000, inf),))
    without.note(0, 500, seconds(0, 500))
    assert without.seconds_left(500, 8000, seconds(0, 500)) > 1.5 * seconds(500, 8000)


RECORDED = json.loads((Path(__file__).parent / "recorded_readings.json").read_text())["readings"]


@pytest.mark.parametrize("reading", RECORDED, ids=[reading["model"] for reading in RECORDED])
def test_what_real_models_took_is_predicted_within_a_fifth(reading):
    """Each chunk's seconds of processor time on one thread, as they were recorded; the average speed is far off."""
    *earlier, length = reading["ends"]
    chunks = [*zip([0, *earlier], reading["ends"], reading["seconds"], strict=True)]
    pace = Pace(growth=tuple((share, reach or inf) for share, reach in reading["growth"]))
    elapsed, errors, averages = 0.0, {}, {}
    for start, end, seconds in chunks[:-1]:
        pace.note(start, end, seconds)
        elapsed += seconds
        rest = sum(reading["seconds"]) - elapsed
        for share in (0.1, 0.3, 0.5, 0.7):
            if end >= share * length and share not in errors:
                errors[share] = pace.seconds_left(end, length, elapsed) / rest - 1
                averages[share] = elapsed * (length - end) / end / rest - 1
    told = [f"{share:.0%} {errors[share]:+.1%} {averages[share]:+.1%}" for share in errors]
    print(reading["model"], "read, error, by the average:", told)
    assert max(map(abs, errors.values())) < 0.2
    assert min(averages.values()) < -0.2


def test_the_average_speed_is_three_times_too_low_there():
    """What a new user saw: 21 s were promised and 60 were to come."""
    pace = Pace()
    for start in range(0, 4096, 1024):
        pace.note(start, start + 1024, seconds_of(start, start + 1024, slowdown=7.0))
    elapsed = seconds_of(0, 4096, slowdown=7.0)
    rest = seconds_of(4096, LENGTH, slowdown=7.0)
    assert (LENGTH - 4096) / (4096 / elapsed) < rest / 2
    assert pace.seconds_left(4096, LENGTH, elapsed) == pytest.approx(rest, rel=0.01)


@given(
    chunks=st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-6, 100)), max_size=20),
    num_left=st.integers(0, 100_000),
    elapsed=st.floats(1e-3, 1e4),
)
def test_whatever_was_measured_nothing_is_left_only_at_the_end(chunks, num_left, elapsed):
    pace, position = Pace(), 0
    for num_tokens, seconds in chunks:
        pace.note(position, position + num_tokens, seconds)
        position += num_tokens
    left = pace.seconds_left(position, position + num_left, elapsed)
    assert left >= 0
    assert (left > 0) == (bool(chunks) and num_left > 0)
