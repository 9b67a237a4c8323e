"""Norms and activations of the GPU against those of the CPU: on the card, or in Triton's interpreter without one."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from penstock.attention.backend import ForwardInputs, Rotation
from penstock.attention.cpu import CpuAttention
from penstock.attention.cuda import CudaAttention
from penstock.cache.storage import KvStorage
from penstock.kernels import triton_layers, triton_products
from penstock.models import layers
from penstock.models.rotary import Rotary
from penstock.models.spec import decoder_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(7, 64), (1, 5000), (33, 4, 80), (5, 3, 128), (0, 64), (130, 1, 24)])
def test_norms_of_rows_and_of_heads(shape):
    torch.manual_seed(0)
    # Heads are a part of a wider product, so that tokens lie further apart than their heads are wide.
    wide = torch.randn(shape[0], 2, *shape[1:])
    x, weight = wide[:, 1], torch.randn(shape[-1])
    expected = layers.RmsNorm(weight=weight, eps=1e-6)(x)
    normed = triton_layers.rms_norm(wide.to(DEVICE)[:, 1], weight.to(DEVICE), 1e-6).cpu()
    assert normed.shape == expected.shape
    assert torch.allclose(normed, expected, atol=1e-5)


def test_positions_on_several_axes_rotate_as_on_the_cpu():
    spec = decoder_spec(
        {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        }
    )
    (rotary_spec,) = spec.rotaries.values()
    counts = torch.arange(40)
    axes = torch.stack([counts, counts // 3, counts % 7])
    x = torch.randn(40, 6, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = x.split([4, 1, 1], dim=1)
    stored = []
    for device, attention_class, options in (
        (torch.device("cpu"), CpuAttention, {}),
        (DEVICE, CudaAttention, {"num_heads": 4}),
    ):
        storage = KvStorage(
            num_layers=1, num_slots=48, num_kv_heads=1, head_size=16, dtype=torch.float32, device=device
        )
        attention = attention_class(storage, 16, **options)
        cos, sin = Rotary(rotary_spec, device).cos_sin(axes.to(device), "default", torch.float32)
        attention.begin_step(
            ForwardInputs(
                ids_T=counts,
                positions_T=counts,
                query_starts=(0, 40),
                context_lens=(40,),
                block_table=((0, 1, 2),),
                rotary_variants=("default",),
                sequence_ids=(0,),
                logit_rows=counts[:0],
            )
        )
        rotation = Rotation(cos_T1R=cos, sin_T1R=sin)
        rotated = attention.store(0, q.to(device), k.to(device), v.to(device), rotation)
        stored.append((rotated.cpu(), storage.keys[0][:40].cpu(), storage.values[0][:40].cpu()))
    for expected, found in zip(*stored, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", triton_layers.KINDS)
@pytest.mark.parametrize("shape", [(3, 2 * 112), (9, 2 * 1500), (0, 64)])
def test_gated_activations(kind, shape):
    torch.manual_seed(0)
    gate_up = torch.randn(shape) * 8
    expected = layers.gated_activation(gate_up.clone(), kind)
    assert torch.allclose(triton_layers.gated_activation(gate_up.to(DEVICE), kind).cpu(), expected, atol=2e-5)


@pytest.mark.parametrize("num_rows", [1, 5, 16])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 1536), (4160, 512), (64, 2048)])
def test_products_of_few_rows(num_rows, num_out, num_in):
    torch.manual_seed(0)
    # Half precision is not simulated faithfully everywhere; whole numbers are exact in any.
    wide = torch.randint(-3, 4, (num_rows, 2, num_in)).to(torch.float16)
    x, weight = wide[:, 1], torch.randint(-3, 4, (num_out, num_in)).to(torch.float16)
    residual = torch.randint(-50, 50, (num_rows, num_out)).to(torch.float16)
    exact = x.float() @ weight.float().t()
    assert triton_products.is_skinny(wide.to(DEVICE)[:, 1], weight.to(DEVICE))
    found = triton_products.product(wide.to(DEVICE)[:, 1], weight.to(DEVICE)).cpu()
    assert torch.equal(found, exact.half())
    out = residual.clone().to(DEVICE)
    triton_products.add_product(out, wide.to(DEVICE)[:, 1], weight.to(DEVICE))
    assert torch.equal(out.cpu(), (residual.float() + exact).half())


def test_wide_or_odd_or_exact_products_are_left_to_the_library():
    def is_skinny(num_rows, num_out, num_in, dtype=torch.float16):
        return triton_products.is_skinny(
            torch.zeros(num_rows, num_in, dtype=dtype), torch.zeros(num_out, num_in, dtype=dtype)
        )

    assert is_skinny(16, 64, 512)
    assert not is_skinny(17, 64, 512)
    assert not is_skinny(0, 64, 512)
    assert not is_skinny(4, 65, 512)
    assert not is_skinny(4, 64, 576)
    assert not is_skinny(4, 64, 512, torch.float32)
