"""Experts in a few kernels against the loop over experts of the CPU: on the card, or in Triton's interpreter."""

import dataclasses
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from parts_on_device import DEVICE, on_device

from penstock.models import cuda_experts
from penstock.models.experts import Experts
from penstock.models.layer_specs import ExpertNames, ExpertsSpec
from penstock.models.layers import Linear

TOLERANCE = 1e-4


def spec(num_experts=8, num_active=2, inner=48, **more):
    usual = {"normalizes_chosen": True, "names": ExpertNames()}
    return ExpertsSpec(num_experts=num_experts, num_active=num_active, intermediate_size=inner, **usual | more)


def experts(spec, *, hidden=64, activation="silu", seed=0):
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    sizes = [(2 * spec.shared_size, hidden), (hidden, spec.shared_size)] if spec.shared_size else []
    shared = [Linear.empty(*size, bias=False, **place) for size in sizes]
    made = Experts.empty(spec, hidden, activation, shared=shared, **place)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(made):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15)
    return made


def tensors(part):
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value) and field.name != "spec":
            yield from tensors(value)


def rows(count, hidden=64, seed=7):
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


def assert_equal_to_cpu(made, x):
    expected = made(x)
    on_card = on_device(made)
    found = cuda_experts.mixed(on_card, x.to(DEVICE))
    assert (found.cpu() - expected).abs().max() <= TOLERANCE
    residual = rows(len(x), x.shape[1], seed=11)
    added = residual.clone().to(DEVICE)
    cuda_experts.add_mixed(on_card, added, x.to(DEVICE))
    assert (added.cpu() - residual - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active"),
    [
        *((count, *mixture) for count in (1, 2, 3, 5, 17) for mixture in ((4, 1), (8, 2), (16, 8), (6, 4))),
        *((64, 16, 8), (200, 4, 1), (200, 8, 2)),
    ],
)
def test_any_number_of_rows(num_rows, num_experts, num_active):
    assert_equal_to_cpu(experts(spec(num_experts, num_active)), rows(num_rows))


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 80), (96, 176), (320, 24)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_odd_sizes_and_activations(num_rows, hidden, inner, activation):
    assert_equal_to_cpu(experts(spec(inner=inner), hidden=hidden, activation=activation), rows(num_rows, hidden))


@pytest.mark.parametrize("num_rows", [1, 6, 40])
@pytest.mark.parametrize(
    "more",
    [
        {"normalizes_chosen": False},
        {"shared_size": 56},
        {"shared_size": 56, "has_shared_gate": False},
        {"has_biases": True, "clamp": 0.4, "clamp_alpha": 1.7},
        {"has_biases": True, "clamp": 7.0, "clamp_alpha": 1.7, "inner": 72},
    ],
    ids=str,
)
def test_every_kind_of_mixture(num_rows, more):
    assert_equal_to_cpu(experts(spec(**more)), rows(num_rows))


@pytest.mark.parametrize("num_rows", [1, 5, 50])
def test_all_rows_may_choose_the_same_experts_and_others_none(num_rows):
    made = experts(spec(16, 3))
    made.router.weight_OI.zero_()
    x = rows(num_rows)
    assert cuda_experts.route(on_device(made), x.to(DEVICE)).experts_TA.cpu().tolist() == [[0, 1, 2]] * num_rows
    made.router.weight_OI[[2, 9, 13]] = 1.0
    made.router.weight_OI[9] *= 1.5
    assert_equal_to_cpu(made, x.abs())


@pytest.mark.parametrize("num_rows", [1, 3, 30, 300])
@pytest.mark.parametrize("normalizes_chosen", [True, False])
def test_routes_are_those_of_the_cpu(num_rows, normalizes_chosen):
    made = experts(spec(12, 5, normalizes_chosen=normalizes_chosen))
    weights, chosen = made.route(rows(num_rows))
    routed = cuda_experts.route(on_device(made), rows(num_rows).to(DEVICE))
    assert routed.experts_TA.cpu().tolist() == chosen.tolist()
    assert torch.allclose(routed.weights_TA.cpu(), weights, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 3), (127, 5), (1025, 17), (5000, 130)])
def test_rows_are_sorted_and_every_one_lies_in_a_tile(num_rows, num_experts):
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.randint(0, num_experts, (num_rows, 1), generator=generator, dtype=torch.int32)
    chosen[chosen == 1] = 2  # one has no rows
    routed = cuda_experts.Routed(experts_TA=chosen.to(DEVICE), weights_TA=torch.ones(num_rows, 1, device=DEVICE))
    placed = cuda_experts.sort(routed, num_experts, 16)
    order, table = placed.order_R.cpu(), placed.tiles.cpu()
    assert order.tolist() == chosen.flatten().argsort(stable=True).tolist()
    num_tiles = table[0, 0].item()
    assert num_tiles <= len(table) - 1 == cuda_experts.most_tiles(num_rows, num_experts, 16)
    seen = []
    for expert, first, end, _ in table[1 : num_tiles + 1].tolist():
        of_tile = order[first : min(first + 16, end)]
        assert (chosen.flatten()[of_tile] == expert).all()
        seen += of_tile.tolist()
    assert seen == order.tolist()


def test_tiles_never_outnumber_those_that_are_launched():
    for num_rows, num_experts, size in [(1, 4, 16), (64, 128, 16), (33, 2, 16), (512, 3, 128)]:
        most = cuda_experts.most_tiles(num_rows, num_experts, size)
        used = min(num_rows, num_experts)
        worst = [1] * (used - 1) + [num_rows - used + 1]
        assert sum(-(-count // size) for count in worst) <= most


@pytest.mark.parametrize("num_rows", [2, 7, 40])
def test_what_a_row_gives_does_not_depend_on_its_neighbours(num_rows):
    """Even if they are no numbers, as rows of padding may be; bit for bit on the card."""
    made = on_device(experts(spec(8, 3, shared_size=24)))
    x = rows(num_rows).to(DEVICE)
    expected = cuda_experts.mixed(made, x)
    others = rows(num_rows, seed=8).to(DEVICE)
    others[::2] = float("nan")
    others[1] = x[1]
    found = cuda_experts.mixed(made, others)
    assert torch.allclose(found[1], expected[1], atol=0 if DEVICE.type == "cuda" else 1e-6)
    assert torch.equal(cuda_experts.mixed(made, x), expected)


def test_padding_is_given_to_no_expert():
    made = on_device(experts(spec(16, 3, shared_size=24)))
    x = rows(9).to(DEVICE)
    expected = cuda_experts.mixed(made, x)
    padded = dataclasses.replace(made, num_real_1=torch.tensor([5], dtype=torch.int32, device=DEVICE))
    assert torch.equal(cuda_experts.mixed(padded, x)[:5], expected[:5])
    routed = cuda_experts.route(made, x, padded.num_real_1)
    assert (routed.experts_TA[5:] == 16).all()
    assert cuda_experts.sort(routed, 16, 16).tiles[0, 0] == len(routed.experts_TA[:5].unique())


def test_no_rows_give_no_rows():
    made = on_device(experts(spec()))
    assert cuda_experts.mixed(made, rows(0).to(DEVICE)).shape == (0, 64)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter multiplies the bits of bfloat16 numbers")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 100, 700, 3000])
@pytest.mark.parametrize(("num_experts", "num_active", "hidden", "inner"), [(16, 4, 512, 176), (8, 2, 1024, 768)])
def test_bfloat16_stays_close_to_float64(num_rows, num_experts, num_active, hidden, inner):
    made = experts(spec(num_experts, num_active, inner), hidden=hidden)
    for tensor in tensors(made):
        tensor.copy_(tensor.bfloat16())
    x = rows(num_rows, hidden).bfloat16()
    half = on_device(made)
    half = dataclasses.replace(
        half,
        router=dataclasses.replace(half.router, weight_OI=half.router.weight_OI.bfloat16()),
        gate_up=half.gate_up_EFM.bfloat16(),
        down=half.down_EMF.bfloat16(),
    )
    routed = cuda_experts.route(half, x.to(DEVICE))
    exact = exact_mixture(made, x.double(), routed)
    found = cuda_experts.mixed(half, x.to(DEVICE)).cpu().double()
    assert found.isfinite().all()
    assert (found - exact).norm() < 1e-2 * exact.norm()


def exact_mixture(made, x, routed):
    """With the routes as they were chosen: a tie in bfloat16 is none in float64."""
    out = torch.zeros_like(x)
    chosen, weights = routed.experts_TA.cpu(), routed.weights_TA.cpu().double()
    for expert in range(made.spec.num_experts):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ made.gate_up_EFM[expert].double().t()).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        out.index_add_(0, tokens, inner @ made.down_EMF[expert].double().t() * weights[tokens, slots, None])
    return out
