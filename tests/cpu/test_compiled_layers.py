"""Norms, the gated activation, rotation and page writes in C: what float64 gives, rounded once to bfloat16."""

import copy

import pytest
import torch
from logit_recorder import LogitRecorder
from tiny_models import prompt, reference_logits

from penstock.attention.backend import ForwardInputs, Rotation
from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage
from penstock.kernels import build
from penstock.kernels.calls import c_kernels
from penstock.models.cpu_layers import multiply
from penstock.models.layers import Linear, RmsNorm, gated_activation, wide_product

pytestmark = pytest.mark.usefixtures("compiled")

ULP = 2**-8  # relative; half of it is rounding


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(found, expected, scale=0.0):
    """`scale`: of what was added up, where its parts may cancel."""
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= ULP * (expected.abs() + scale) + 1e-30).all()


@pytest.mark.parametrize("num_rows", [1, 3, 500])
@pytest.mark.parametrize("width", [8, 24, 100, 576])
def test_a_norm(num_rows, width):
    x, weight = random(num_rows, width), torch.rand(width) + 0.5
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_rounded(RmsNorm(weight=weight, eps=1e-5)(x), expected)


def test_a_norm_of_heads_that_lie_among_others():
    packed = random(40, 7 * 32)
    heads = packed[:, 32 : 5 * 32].unflatten(-1, (4, 32))
    weight = torch.rand(32)
    wide = heads.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_rounded(RmsNorm(weight=weight, eps=1e-6)(heads), expected)


@pytest.mark.parametrize("kind", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (7, 100), (300, 1536)])
def test_a_gated_activation(kind, num_rows, width):
    gate_up = random(num_rows, 2 * width).mul_(8)
    gate, up = gate_up.double().chunk(2, -1)
    act = torch.nn.functional.silu if kind == "silu" else lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    # Below -5 the double tanh itself cancels: an absolute error of 1e-6 of the input is allowed there.
    found = gated_activation(gate_up, kind)
    assert ((found.double() - act(gate) * up).abs() <= ULP * (act(gate) * up).abs() + 1e-6 * gate_up.abs().max()).all()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 8), (24, 40), (65, 1600), (200, 576), (130, 100), (40, 1025)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 9, 16, 17, 32, 33, 100, 130, 385])
def test_a_product_is_what_it_should_be_and_is_added_to_what_is_there(num_rows, num_out, num_in, bias):
    linear = Linear(weight_OI=random(num_out, num_in), bias_O=random(num_out, seed=2) if bias else None)
    x, out = random(num_rows, num_in, seed=3), random(num_rows, num_out, seed=4)
    expected = x.double() @ linear.weight_OI.double().T + (linear.bias_O.double() if bias else 0)
    before = out.double()
    assert_rounded(linear(x), expected, scale=0.1)
    linear.add_to(out, x)
    # With a bias and many rows torch adds a product that was rounded already.
    assert_rounded(out, before + expected, scale=0.1 + expected.abs())


def test_a_product_of_more_rows_than_are_turned_at_once():
    x, weight = random(1030, 96, seed=3), random(130, 96)
    found = multiply(c_kernels(), x, weight, None)
    assert_rounded(found, x.double() @ weight.double().T, scale=0.1)


@pytest.mark.parametrize("num_in", [8, 96, 1025])
def test_a_row_has_the_same_bits_among_any_number_of_rows(num_in, compiled):
    if not build.found(compiled).instructions.multiplies_all:
        pytest.skip("few rows are added up in another order there than many")
    x, weight = random(400, num_in, seed=3), random(130, num_in)
    together = wide_product(x, weight)
    for count in (1, 2, 3, 7, 16, 17, 64, 193, 300):
        assert torch.equal(wide_product(x[:count], weight), together[:count]), f"{count} rows"
        assert torch.equal(wide_product(x[-count:], weight), together[-count:]), f"the last {count} rows"
    torch.set_num_threads(2)
    assert torch.equal(wide_product(x, weight), together), "of two threads"


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 100])
def test_a_wide_product_is_not_rounded_to_the_dtype_of_the_model(num_rows):
    x, weight = random(num_rows, 96, seed=3), random(130, 96)
    expected = x.double() @ weight.double().T
    found = wide_product(x, weight)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-4
    assert (found.bfloat16().float() - expected).abs().max() > 1e-3, "it would show if it were rounded"


@pytest.mark.parametrize("num_rotated", [0, 16, 24, 64], ids="{} dimensions are rotated".format)
def test_keys_and_values_go_to_their_slots_and_all_but_values_are_rotated(num_rotated):
    heads, kv_heads, size, blocks = 4, 2, 64, ((5, 2, 0), (1, 3))
    chunks, half = ((30, 41), (7, 20)), num_rotated // 2
    positions = torch.cat([torch.arange(start, end) for start, end in chunks])
    rows = len(positions)
    q, k, v = random(rows, (heads + 2 * kv_heads) * size).split([heads * size, kv_heads * size, kv_heads * size], -1)
    q, k, v = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (kv_heads, -1)), v.unflatten(-1, (kv_heads, -1))
    place = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    storage = KvStorage(num_layers=1, num_slots=96, num_kv_heads=kv_heads, head_size=size, **place)
    attention = CpuAttention(storage, 16)
    attention.begin_step(
        ForwardInputs(
            ids_T=torch.zeros(rows, dtype=torch.long),
            positions_T=positions,
            query_starts=(0, 11, 24),
            context_lens=(41, 20),
            block_table=blocks,
            rotary_variants=("default", "default"),
            sequence_ids=(0, 1),
            logit_rows=torch.zeros(0, dtype=torch.long),
        )
    )
    angles = torch.rand(rows, 1, half) * 6
    rotation = Rotation(cos_T1R=angles.cos().bfloat16(), sin_T1R=angles.sin().bfloat16()) if num_rotated else None
    found = attention.store(0, q, k, v, rotation)

    def turned(x):
        x = x.double()
        if rotation is None:
            return x
        cos, sin, one, two = (
            rotation.cos_T1R.double(),
            rotation.sin_T1R.double(),
            x[..., :half],
            x[..., half : 2 * half],
        )
        return torch.cat([one * cos - two * sin, two * cos + one * sin, x[..., 2 * half :]], -1)

    slots = [blocks[0][p // 16] * 16 + p % 16 for p in range(*chunks[0])]
    slots += [blocks[1][p // 16] * 16 + p % 16 for p in range(*chunks[1])]
    assert_rounded(found, turned(q))
    assert_rounded(storage.keys[0][slots], turned(k))
    assert torch.equal(storage.values[0][slots], v)
    others = sorted(set(range(96)) - set(slots))
    assert not storage.keys[0][others].any()
    assert not storage.values[0][others].any()


@pytest.mark.parametrize(
    "name", ["gemma4-moe", *(pytest.param(name, marks=pytest.mark.evidence) for name in ("gemma4-e", "gemma4-dense"))]
)
def test_unlike_layers_in_bfloat16_are_no_further_from_float32_than_transformers_is(name, tiny, load):
    """The middle of many prompts: rounding may turn a token to another expert."""
    prompts = [prompt(length, seed=length) for length in range(20, 62, 3)]
    model = tiny(name)[1]
    exact = [reference_logits(model, tokens)[-1] for tokens in prompts]
    rounded = copy.deepcopy(model).bfloat16()
    yardstick = torch.stack([reference_logits(rounded, tokens)[-1] for tokens in prompts])
    engine = load(name, dtype="bfloat16", chunk_size=13)
    assert engine.model.lane.attention.compiled is not None
    recorder = LogitRecorder(engine)
    for tokens in prompts:
        engine.generate(tokens, max_tokens=1)
    far, far_of_transformers = (
        (found - torch.stack(exact)).norm(dim=1).median() for found in (recorder.all, yardstick)
    )
    assert far <= 1.5 * far_of_transformers
