"""Norms and activations of the GPU against those of the CPU: on the card, or in Triton's interpreter without one."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from penstock.models import layers, triton_layers

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


@pytest.mark.parametrize("kind", triton_layers.KINDS)
@pytest.mark.parametrize("shape", [(3, 2 * 112), (9, 2 * 1500), (0, 64)])
def test_gated_activations(kind, shape):
    torch.manual_seed(0)
    gate_up = torch.randn(shape) * 8
    expected = layers.gated_activation(gate_up.clone(), kind)
    assert torch.allclose(triton_layers.gated_activation(gate_up.to(DEVICE), kind).cpu(), expected, atol=2e-5)
