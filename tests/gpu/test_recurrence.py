"""Recurrent layers in a few kernels against those of the CPU: on the card, or in Triton's interpreter."""

import dataclasses
import itertools
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from parts_on_device import DEVICE, on_device

from penstock.attention.backend import ForwardInputs
from penstock.attention.chunk_tables import ChunkTables
from penstock.cache.storage import LayerState
from penstock.models.delta import GatedDelta
from penstock.models.layer_specs import ConvSpec, DeltaSpec, MambaSpec
from penstock.models.layers import Linear
from penstock.models.mamba import Mamba
from penstock.models.short_conv import ShortConv

CPU = torch.device("cpu")
# The interpreter multiplies the bits of bfloat16 numbers.
HALF = torch.float16 if DEVICE == CPU else torch.bfloat16
ON_CARD = pytest.mark.skipif(DEVICE == CPU, reason="takes long in the interpreter")
HIDDEN, NUM_SLOTS, TOLERANCE = 32, 6, 1e-4
DELTA = DeltaSpec(num_key_heads=2, num_value_heads=4, key_size=24, value_size=40, conv_width=4, is_grouped=True)
MAMBA = MambaSpec(
    num_heads=6,
    head_size=20,
    num_groups=2,
    state_size=24,
    conv_width=4,
    has_conv_bias=True,
    has_bias=False,
    time_step_limits=(0.001, float("inf")),
)
KINDS = {
    "grouped delta": DELTA,
    "delta": dataclasses.replace(DELTA, num_key_heads=3, num_value_heads=3, is_grouped=False, conv_width=3),
    "mamba": MAMBA,
    "mamba normed first": dataclasses.replace(MAMBA, num_groups=1, norms_before_gate=True, has_conv_bias=False),
    "mamba without norm": dataclasses.replace(MAMBA, num_groups=1, has_norm=False, time_step_limits=(0.05, 0.4)),
    "short convolution": ConvSpec(num_channels=HIDDEN, conv_width=3, has_bias=True),
}
# How many tokens each chunk has.
STEPS = ((1,), (70,), (1, 1, 1), (2, 33, 64), (1, 5, 1, 97, 1), (3, 2, 1))


def recurrence(name, dtype=torch.float32):
    spec, place = KINDS[name], {"dtype": dtype, "device": CPU}
    if isinstance(spec, DeltaSpec):
        sizes, output, make = (spec.widest_rows, 2 * spec.num_value_heads), spec.value_width, GatedDelta.empty
    elif isinstance(spec, MambaSpec):
        sizes, output, make = (spec.widest_rows,), spec.inner_width, Mamba.empty
    else:
        sizes, output, make = (3 * spec.num_channels,), spec.num_channels, ShortConv.empty
    linears = {
        role: Linear.empty(size, HIDDEN, bias=False, **place)
        for role, size in zip(("recurrent_input", "recurrent_gates"), sizes, strict=False)
    }
    linears["recurrent_output"] = Linear.empty(HIDDEN, output, bias=False, **place)
    made = make(spec, linears, **place) if make == ShortConv.empty else make(spec, 1e-6, linears, **place)
    generator = torch.Generator().manual_seed(0)
    weights = [*(linear.weight_OI for linear in linears.values()), *(one for _, one in made.destinations(""))]
    for tensor in weights:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
    return made


def new_state(made, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((NUM_SLOTS, *made.spec.matrix_shape), (NUM_SLOTS, *made.spec.tail_shape))
    matrices, tails = (torch.randn(shape, generator=generator) for shape in shapes)
    return LayerState(matrices_SHKV=matrices, tails_SWC=tails.to(made.conv_CW.dtype))


def moved(state):
    return LayerState(
        matrices_SHKV=state.matrices_SHKV.clone().to(DEVICE), tails_SWC=state.tails_SWC.clone().to(DEVICE)
    )


def inputs_of(counts, slots, tables=None):
    none = torch.empty(0)
    starts = tuple(itertools.accumulate(counts, initial=0))
    return ForwardInputs(
        ids_T=none, positions_T=none, query_starts=starts, context_lens=starts[1:], block_table=(),
        rotary_variants=(), sequence_ids=(), logit_rows=none, state_slots=tuple(slots), chunk_tables=tables,
    )  # fmt: skip


def on_card(made, x, counts, slots, state):
    plain = inputs_of(counts, slots)
    tables = ChunkTables.of(plain.query_starts, slots, dtype=x.dtype, device=DEVICE)
    with torch.inference_mode():
        return made(x.to(DEVICE), inputs_of(counts, slots, tables), state).cpu()


def tokens(count, seed=5):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_equal_states(found, expected):
    for one, other in zip(
        (found.matrices_SHKV, found.tails_SWC), (expected.matrices_SHKV, expected.tails_SWC), strict=True
    ):
        assert torch.allclose(one.cpu(), other.cpu(), atol=TOLERANCE)


@pytest.mark.parametrize("counts", STEPS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_gives_what_the_cpu_gives_and_leaves_the_same_states(name, counts):
    made = recurrence(name)
    slots = [4, 0, 5, 2, 1][: len(counts)]
    state = new_state(made)
    found_state, x = moved(state), tokens(sum(counts))
    expected = made(x, inputs_of(counts, slots), state)
    found = on_card(on_device(made), x, counts, slots, found_state)
    assert (found - expected).abs().max() <= TOLERANCE * max(1, expected.abs().max())
    assert_equal_states(found_state, state)


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_chunks_gives_what_it_gives_whole(name):
    made = on_device(recurrence(name))
    state, x = new_state(made), tokens(150)
    whole_state, cut_state = moved(state), moved(state)
    whole = on_card(made, x, (150,), (3,), whole_state)
    sizes, found = (1, 2, 31, 1, 64, 3, 48), []
    for first, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        found.append(on_card(made, x[first:end], (end - first,), (3,), cut_state))
    assert (torch.cat(found) - whole).abs().max() <= TOLERANCE * max(1, whole.abs().max())
    assert_equal_states(cut_state, whole_state)


@pytest.mark.parametrize("name", KINDS)
def test_padding_and_steps_without_tables_touch_nothing(name):
    made = on_device(recurrence(name))
    state, x, counts, slots = new_state(made), tokens(96), (1, 40, 1), (2, 5, 0)
    alone_state, padded_state = moved(state), moved(state)
    expected = on_card(made, x[:42], counts, slots, alone_state)
    padded = ChunkTables.of_padded(128, has_longer=True, dtype=torch.float32, device=DEVICE)
    with torch.inference_mode():
        made(x.to(DEVICE), inputs_of((), (), padded.of_size(96)), padded_state)
        assert torch.equal(padded_state.matrices_SHKV.cpu(), state.matrices_SHKV)
        assert torch.equal(padded_state.tails_SWC.cpu(), state.tails_SWC)
        padded.fill(inputs_of(counts, slots).query_starts, slots)
        x[42:] = float("nan")
        found = made(x.to(DEVICE), inputs_of((), (), padded.of_size(96)), padded_state)[:42].cpu()
    assert torch.equal(found, expected)
    assert torch.equal(padded_state.matrices_SHKV, alone_state.matrices_SHKV)
    assert torch.equal(padded_state.tails_SWC, alone_state.tails_SWC)


def test_rows_of_tables_are_shared_by_fewer_programs():
    made, counts = recurrence("grouped delta"), ((1,) * 40 + (2,) * 4 + (250, 1))
    state = LayerState(
        matrices_SHKV=torch.randn(len(counts), *made.spec.matrix_shape),
        tails_SWC=torch.randn(len(counts), *made.spec.tail_shape),
    )
    found_state, x, slots = moved(state), tokens(sum(counts)), list(reversed(range(len(counts))))
    expected = made(x, inputs_of(counts, slots), state)
    found = on_card(on_device(made), x, counts, slots, found_state)
    assert (found - expected).abs().max() <= TOLERANCE * max(1, expected.abs().max())
    assert_equal_states(found_state, state)


def test_keys_that_repeat_without_decay_lose_no_digits():
    """Powers of such a system are sums of large numbers of both signs."""
    made = recurrence("delta")
    made.a_log_H.fill_(-30.0)
    made.beta_alpha.weight_OI.fill_(5.0)
    state, x = new_state(made), tokens(1).abs().expand(130, -1).contiguous()
    found_state = moved(state)
    expected = made(x, inputs_of((130,), (1,)), state)
    found = on_card(on_device(made), x, (130,), (1,), found_state)
    assert (found - expected).abs().max() <= 10 * TOLERANCE
    assert_equal_states(found_state, state)


@pytest.mark.parametrize("counts", [(1,) * 5, (1, 130, 1, 64), pytest.param((500,), marks=ON_CARD)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_half_precision_is_as_near_to_float32_as_the_cpu_is(name, counts):
    wide, half = recurrence(name), recurrence(name, HALF)
    pairs = [*zip(wide.destinations(""), half.destinations(""), strict=True)]
    for one, other in [(a[1], b[1]) for a, b in pairs]:
        one.copy_(other)
    for one, other in zip((*wide.inputs, wide.output), (*half.inputs, half.output), strict=True):
        one.weight_OI.copy_(other.weight_OI)
    slots, x = [4, 0, 5, 2, 1][: len(counts)], tokens(sum(counts)).to(HALF)
    states = {"exact": new_state(wide), "cpu": new_state(half)}
    states["exact"].tails_SWC.copy_(states["cpu"].tails_SWC)
    states["card"] = moved(states["cpu"])
    exact = wide(x.float(), inputs_of(counts, slots), states["exact"])
    cpu = half(x, inputs_of(counts, slots), states["cpu"]).float()
    card = on_card(on_device(half), x, counts, slots, states["card"]).float()
    assert (card - exact).norm() <= 1.25 * (cpu - exact).norm() + 1e-3 * exact.norm()
    errors = [(states[of].matrices_SHKV.cpu() - states["exact"].matrices_SHKV).norm() for of in ("card", "cpu")]
    assert errors[0] <= 1.25 * errors[1] + 1e-4 * states["exact"].matrices_SHKV.norm()
