"""As few layers stream as the budget asks for, evenly spread, and none where all of them fit."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.engine.planning import plan_model
from penstock.errors import InvalidSetting, MemoryTooSmall
from penstock.plan.expert_slots import Mixture
from penstock.plan.placement import NUM_READERS, NUM_SLOTS, READ_BYTES, Placement, StreamingPlan, place_layers, spread

MB = 10**6
SIZES = st.lists(st.integers(1 * MB, 900 * MB), min_size=1, max_size=80)


def saved_bytes(sizes: list[int], num_streamed: int) -> int:
    """What is not resident any more, of layers and of a ring with slots for the largest of them in whole pages."""
    streamed = [sizes[index] for index in spread(num_streamed, len(sizes))]
    slots = min(NUM_SLOTS, num_streamed) * -(-max(streamed) // 4096) * 4096
    return sum(streamed) - slots - NUM_READERS * READ_BYTES


@settings(max_examples=50)
@given(SIZES, st.integers(1, 40_000 * MB))
def test_what_streams_saves_what_is_lacking_and_fewer_layers_would_not(sizes, lacking):
    found = place_layers(sizes, lacking_bytes=lacking)
    num_streamed = len(sizes) + 1 if found is None else len(found.streamed)
    assert all(saved_bytes(sizes, fewer) < lacking for fewer in range(1, num_streamed))
    if found is not None:
        assert found.saved_bytes == saved_bytes(sizes, num_streamed) >= lacking
        assert num_streamed > NUM_SLOTS, "fewer than the ring has slots save nothing"


@given(SIZES, st.integers(-(10**12), 0))
def test_nothing_streams_that_fits(sizes, lacking):
    found = place_layers(sizes, lacking_bytes=lacking)
    assert found is not None
    assert not found.streamed
    assert found.saved_bytes == found.ring_bytes == 0


@given(st.integers(1, 200), st.data())
def test_streamed_layers_are_spread_evenly(num_layers, data):
    num_streamed = data.draw(st.integers(1, num_layers))
    found = spread(num_streamed, num_layers)
    assert len(set(found)) == num_streamed
    assert found == tuple(sorted(found))
    assert 0 <= found[0] <= found[-1] < num_layers
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_computing_is_the_bound_from_where_it_takes_as_long_as_a_pass():
    placement = Placement(streamed=(0, 1, 2, 3), num_layers=8, pass_bytes=4 * 10**9, slot_bytes=10**9)
    plan = StreamingPlan.of(placement, flops_per_token=8e9, num_cores=2, bytes_per_s=2e9)
    assert plan is not None
    assert plan.pass_s == 2.0
    assert plan.compute_bound_tokens == round(2.0 * 2 * 150e9 / 8e9)
    assert "4 of 8 layers stream from disk: 4,000 MB" in plan.summary()
    assert StreamingPlan.of(Placement(), flops_per_token=1, num_cores=1) is None


MODEL = {"quantize": "none", "device": "cpu"}


def planned(megabytes: int, **others):
    return plan_model("smollm2", 2048, EngineConfig(memory=megabytes * MB, **MODEL, **others))


def test_a_plan_streams_as_the_budget_says_and_stays_within_it():
    streams = False
    for megabytes in range(800, 400, -25):
        try:
            plan = planned(megabytes)
        except MemoryTooSmall:
            break
        assert (plan.streaming is not None) >= streams, "what streamed does not stay in less memory"
        streams = plan.streaming is not None
        assert plan.prompt.peak_bytes <= megabytes * MB or not plan.prompt.fits
        assert any("layers stream from disk" in one for one in plan.prompt.adjustments) == streams
    assert streams


def test_a_plan_of_layers_that_stay_has_none_that_stream():
    assert planned(2000).streaming is None


def test_strict_refuses_to_stream_and_says_what_would_do():
    with pytest.raises(InvalidSetting, match=r"--strict: \d+ of 30 layers would stream from disk"):
        planned(500, strict=True)


def test_wider_steps_are_picked_where_layers_stream():
    plan = planned(560)
    assert plan.streaming is not None
    assert plan.prompt.num_chunks == 1
    assert planned(560, chunk_size=512).prompt.num_chunks == 4


def test_every_layer_is_counted(tmp_path: Path):
    """The sum over layers is what the model has beside its tables and norms."""
    from penstock.models.files import resolve
    from penstock.models.shapes import layer_bytes
    from penstock.models.spec import decoder_spec

    spec = decoder_spec(resolve("smollm2", weights=False).config)
    norms = spec.hidden_size * (2 * spec.num_layers + 1)
    assert sum(layer_bytes(spec, "bfloat16", None)) == 2 * (spec.num_parameters - spec.num_embedded - norms)


MIXTURE = st.integers(1, 40).map(
    lambda count: Mixture(num_experts=16, num_active=2, expert_bytes=(0, *[5 * MB] * count))
)


@given(MIXTURE, st.integers(1, 4000 * MB))
def test_of_a_mixture_all_else_stays_while_experts_alone_save_what_is_lacking(mixture, lacking):
    num_layers = len(mixture.expert_bytes)
    sizes = [90 * MB] + [mixture.layer_bytes(index) + 10 * MB for index in range(1, num_layers)]
    found = place_layers(sizes, lacking_bytes=lacking, mixture=mixture)
    whole = place_layers(sizes, lacking_bytes=lacking)
    most = mixture.layer_bytes(1) * (num_layers - 1 - NUM_SLOTS) - NUM_READERS * READ_BYTES - NUM_SLOTS * 4096
    assert (found is None) == (whole is None)
    if found is None or whole is None:
        return
    assert found.streams_experts_alone or lacking > most
    assert 0 not in found.streamed or not found.streams_experts_alone, "it has no experts"
    chosen = 2 * sum(mixture.expert_bytes[index] for index in found.streamed)
    others = 0 if found.streams_experts_alone else sum(sizes[i] - mixture.layer_bytes(i) for i in found.streamed)
    assert found.token_bytes == chosen + others
    assert found.pass_bytes == sum(mixture.layer_bytes(index) for index in found.streamed) + others


@given(MIXTURE, st.integers(1, 2000 * MB))
def test_what_is_left_of_the_budget_is_for_experts(mixture, lacking):
    sizes = [mixture.layer_bytes(index) + 10 * MB for index in range(len(mixture.expert_bytes))]
    found = place_layers(sizes, lacking_bytes=lacking, mixture=mixture)
    if found is not None:
        assert lacking <= found.saved_bytes < lacking + 4096
        assert found.saved_bytes == found.pass_bytes - found.ring_bytes


def test_a_plan_tells_what_a_token_reads():
    mixture = Mixture(num_experts=10, num_active=1, expert_bytes=(10**8,) * 8)
    placement = Placement(
        streamed=(0, 1, 2, 3), num_layers=8, pass_bytes=4 * 10**9, slot_bytes=10**9, mixture=mixture, cache_bytes=4096
    )
    plan = StreamingPlan.of(placement, flops_per_token=8e9, num_cores=2, bytes_per_s=2e9)
    assert plan is not None
    assert (plan.token_bytes, plan.cache_bytes) == (4 * 10**8, 4096)
    assert plan.summary().endswith(
        "; about 400 MB for each token that is written, 0.2 s, as it reads no experts but its own"
    )
