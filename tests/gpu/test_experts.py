"""Experts in a few kernels against the loop over experts of the CPU: on the card, or in Triton's interpreter."""

import dataclasses
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from gguf.constants import GGMLQuantizationType as Type
from gguf_models import write_gguf
from parts_on_device import DEVICE, on_device
from tiny_models import put_experts_in_mxfp4, save_tiny_model

from penstock.errors import UnsupportedModel
from penstock.models import cuda_experts
from penstock.models.decoder import Decoder
from penstock.models.experts import Experts
from penstock.models.files import resolve
from penstock.models.layer_specs import ExpertNames, ExpertsSpec
from penstock.models.layers import Linear
from penstock.models.mxfp4 import Mxfp4Matrices, mxfp4_values
from penstock.models.quantization import has_codes_for_card, quantization_of
from penstock.models.shapes import native_shape
from penstock.models.spec import decoder_spec
from penstock.models.weights import open_weights

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


def coded_experts(num_experts, num_active, inner, hidden, seed=3):
    """Random codes as gpt-oss is published with, and the same mixture with what they stand for."""
    plain = experts(
        spec(num_experts, num_active, inner, has_biases=True, clamp=7.0, clamp_alpha=1.702), hidden=hidden, seed=seed
    )
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, num_outputs, num_inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        matrices = Mxfp4Matrices.empty(
            num_experts, num_outputs, num_inputs, is_alternating=name == "gate_up", device=DEVICE
        )
        for expert in range(num_experts):
            shape = (num_outputs, num_inputs // 32)
            codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            powers = torch.randint(119, 124, shape, generator=generator, dtype=torch.uint8)
            matrices.take(expert, codes, powers)
            getattr(plain, name)[expert] = mxfp4_values(codes.flatten(), powers.flatten()).view(num_outputs, -1)
        found[name] = matrices
    coded = dataclasses.replace(on_device(plain), gate_up_bias_EF=plain.gate_up_bias_EF.to(DEVICE, copy=True), **found)
    coded.settle(hidden)
    return plain, coded


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active", "inner", "hidden"),
    [
        *((count, 4, 2, 96, 160) for count in (1, 2, 3, 17, 70, 300)),
        *((count, 8, 4, 64, 32) for count in (1, 5, 40)),
        pytest.param(4, 2, 1, 2880, 2880, marks=pytest.mark.long),
    ],
)
def test_experts_in_mxfp4_give_what_their_values_give(num_rows, num_experts, num_active, inner, hidden):
    plain, coded = coded_experts(num_experts, num_active, inner, hidden)
    x = rows(num_rows, hidden)
    found = cuda_experts.mixed(coded, x.to(DEVICE)).cpu()
    expected = cuda_experts.mixed(on_device(plain), x.to(DEVICE)).cpu()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found - plain(x)).abs().max() <= 1e-4 * expected.abs().max()


def test_a_scale_that_kernels_do_not_hold_is_refused():
    matrices = Mxfp4Matrices.empty(1, 8, 32, is_alternating=False, device=DEVICE)
    codes, powers = torch.zeros(8, 1, 16, dtype=torch.uint8), torch.full((8, 1), 129, dtype=torch.uint8)
    matrices.take(0, codes, powers - 1)
    with pytest.raises(UnsupportedModel, match="--quantize none"):
        matrices.take(0, codes, powers)


@pytest.mark.parametrize("is_gguf", [False, True], ids=["safetensors", "GGUF"])
def test_a_checkpoint_in_mxfp4_is_kept_as_it_is(tmp_path, is_gguf):
    save_tiny_model("gpt-oss", tmp_path)
    if is_gguf:
        path = write_gguf(tmp_path, "gpt-oss", tmp_path / "model.gguf", lambda name: Type.MXFP4)
        files = resolve(str(path))
    else:
        put_experts_in_mxfp4(tmp_path)
        files = resolve(str(tmp_path))
    assert has_codes_for_card(files)
    place = {"dtype": torch.float32, "device": DEVICE}
    found, expanded = (
        Decoder(decoder_spec(files.config), quantization=quantization, **place)
        for quantization in (quantization_of(files, "keep", "cuda"), None)
    )
    for decoder in (found, expanded):
        decoder.load(open_weights(files))
    assert found.residual_dtype == torch.float32
    x = rows(5, found.spec.hidden_size).to(DEVICE)
    for ours, plain in zip(found.layers, expanded.layers, strict=True):
        assert isinstance(ours.mlp.down, Mxfp4Matrices)
        expected = cuda_experts.mixed(plain.mlp, x)
        assert (cuda_experts.mixed(ours.mlp, x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    held = sum(
        one.words_EGOW.nbytes + one.factors_EGO.nbytes
        for one in dict(found.destinations()).values()
        if isinstance(one, Mxfp4Matrices)
    )
    assert held == native_shape(files.config, "float32", quantization_of(files, "keep", "cuda")).quantized_bytes
