"""Steps that are padded as recordings are, against the steps themselves: on the card, or in Triton's interpreter.

Here every kernel of them is launched; that a recording replays the same kernels is for test_on_card.py.
"""

import dataclasses
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from tiny_models import CONFIGS, VOCABULARY, prompt

from penstock.attention.cuda import CudaAttention
from penstock.cache.storage import KvStorage, StateStorage
from penstock.lanes.graphs import DecodeGraphs
from penstock.lanes.pieces import StepPieces
from penstock.models.decoder import Decoder
from penstock.models.spec import decoder_spec
from penstock.proof.text import BLOCK_SIZE, step_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HYBRIDS = ("qwen3-next", "qwen3-5", "granite-hybrid", "falcon-h1", "nemotron-h", "lfm2")
PROMPTS = [prompt(length, seed=length) for length in (70, 21, 9)]
# (first, end) of each sequence in each step: chunks, chunks beside decodes, then decodes alone.
STEPS = (
    [(0, 40), (0, 0), (0, 5)],
    [(40, 68), (0, 13), (5, 6)],
    [(68, 69), (13, 20), (6, 7)],
    [(69, 70), (20, 21), (7, 8)],
)


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "qwen3-moe", "gpt-oss", *HYBRIDS])
def decoder(request):
    decoder = Decoder(decoder_spec(CONFIGS[request.param]().to_dict()), dtype=torch.float32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for _, destination in decoder.destinations():
        values = torch.randn(destination.shape, generator=generator)
        destination.copy_(values * 0.15 if destination.dim() > 1 else 1 + 0.2 * values)
    return decoder


def attention_over(decoder):
    spec = decoder.spec
    storage = KvStorage(
        num_layers=len(spec.keeping_layers),
        num_slots=64 * BLOCK_SIZE,
        num_kv_heads=[layer.num_kv_heads for layer in spec.keeping_layers],
        head_size=[layer.head_size for layer in spec.keeping_layers],
        dtype=torch.float32,
        device=DEVICE,
    )
    # What nobody wrote must not be read either.
    for pages in (*storage.keys, *storage.values):
        pages.fill_(float("nan"))
    return CudaAttention(storage, BLOCK_SIZE, num_heads=spec.num_heads)


def states_of(decoder):
    spec = decoder.spec
    if spec.recurrent is None:
        return None
    states = StateStorage(
        layers=spec.recurrent_layers,
        num_slots=len(PROMPTS),
        matrix_shape=spec.recurrent.matrix_shape,
        tail_shape=spec.recurrent.tail_shape,
        dtype=torch.float32,
        device=DEVICE,
    )
    for slot in range(len(PROMPTS)):
        states.copy(None, slot)
    return states


def plain(decoder):
    attention, states = attention_over(decoder), states_of(decoder)

    def run(inputs):
        attention.begin_step(inputs)
        return decoder.forward(inputs, attention, states)

    return run


def padded(decoder):
    attention, states = attention_over(decoder), states_of(decoder)
    graphs = DecodeGraphs(decoder, attention.for_decodes(max_rows=4, max_context=128), states)
    pieces = StepPieces(decoder, attention.for_pieces(max_rows=64), states)
    pieces.attention.prepare()
    graphs.is_replaying = pieces.is_replaying = False
    assert [graphs.fits(step(spans)) for spans in STEPS] == [False, False, False, True]
    return lambda inputs: (graphs if graphs.fits(inputs) else pieces).forward(inputs)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs recordings that fail: without a card every one does")
def test_steps_whose_recordings_fail_are_launched_and_it_is_said(decoder):
    attention, states = attention_over(decoder), states_of(decoder)
    graphs = DecodeGraphs(decoder, attention.for_decodes(max_rows=4, max_context=128), states)
    pieces = StepPieces(decoder, attention.for_pieces(max_rows=64), states)
    with pytest.warns(UserWarning, match="steps with prompt chunks are launched kernel by kernel"):
        pieces.capture_all()
    assert not any(pieces.fits(step(spans)) for spans in STEPS)

    def run(inputs):
        if graphs.fits(inputs):
            with pytest.warns(UserWarning, match="decodes are launched kernel by kernel"):
                return graphs.forward(inputs)
        attention.begin_step(inputs)
        return decoder.forward(inputs, attention, states)

    found = read(run)
    assert graphs.gave_up
    assert not graphs.fits(step(STEPS[-1]))
    for one, expected in zip(found, read(plain(decoder)), strict=True):
        assert (one - expected).abs().max() <= 1e-4 * max(1, 0.1 * expected.abs().max())


def step(spans):
    return dataclasses.replace(step_inputs(PROMPTS, spans, DEVICE), state_slots=(2, 0, 1))


@torch.inference_mode()
def read(run):
    return [run(step(spans)).cpu().clone() for spans in STEPS]


def test_padding_changes_nothing(decoder):
    assert max(max(tokens) for tokens in PROMPTS) < VOCABULARY
    for found, expected in zip(read(padded(decoder)), read(plain(decoder)), strict=True):
        assert found.shape == expected.shape
        assert torch.isfinite(expected).all()
        assert (found - expected).abs().max() <= 1e-4 * max(1, 0.1 * expected.abs().max())
