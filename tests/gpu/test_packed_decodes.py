"""Decodes of a transformers model over padded buffers, as recorded: on the card, or in Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from tiny_generic import MUST_SHOW
from tiny_models import prompt
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.attention.cuda import CudaAttention
from penstock.cache.storage import KvStorage
from penstock.foreign.pages import JoinedModel, attention_calls, use_paged_attention
from penstock.foreign.signature import read_signature
from penstock.lanes.graphs import DecodeGraphs
from penstock.proof.text import BLOCK_SIZE, step_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_CONTEXT = 256
PROMPTS = [prompt(length, seed=length) for length in (9, 21, 2)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MUST_SHOW["llama"](), dtype=torch.float32).eval().to(DEVICE)


def joined_model(model, *, joins=True):
    use_paged_attention(model)
    signature = read_signature(model)
    calls = attention_calls(model, signature)
    storage = KvStorage(
        num_layers=len(calls),
        num_slots=64 * BLOCK_SIZE,
        num_kv_heads=calls[0].num_kv_heads,
        head_size=calls[0].head_size,
        dtype=torch.float32,
        device=DEVICE,
    )
    attention = CudaAttention(storage, BLOCK_SIZE, num_heads=calls[0].num_heads)
    return JoinedModel(model, signature, attention, num_calls=len(calls), joins=joins)


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("glm", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),  # half of each head is rotated
        ("stablelm", {"num_key_value_heads": 2}),
        ("gpt_neox", {}),  # one product gives queries, keys and values of a head beside each other
    ],
)
def test_keys_and_values_may_lie_in_memory_in_any_way(name, more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **more), dtype=torch.float32)
    model = model.eval().to(DEVICE)
    prompts = [[token % SIZES["vocab_size"] for token in tokens] for tokens in PROMPTS]
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([tokens], device=DEVICE)).logits[0, -1:] for tokens in prompts])
        joined = joined_model(model)
        joined.run(step_inputs(prompts, [(0, len(tokens) // 2) for tokens in prompts], DEVICE))
        found = joined.run(step_inputs(prompts, [(len(tokens) // 2, len(tokens)) for tokens in prompts], DEVICE))
    last_rows = torch.tensor([len(tokens) - len(tokens) // 2 for tokens in prompts]).cumsum(0) - 1
    assert (found[last_rows.to(DEVICE)] - expected).abs().max() <= 1e-5


def with_graphs(joined, max_rows=4):
    joined.graphs = DecodeGraphs(
        joined.joined, joined.attention.for_decodes(max_rows=max_rows, max_context=MAX_CONTEXT)
    )
    return joined


def read(joined):
    """Logits of the prompts' last tokens, each read in a step of decodes after all that comes before."""
    joined.run(step_inputs(PROMPTS, [(0, len(tokens) - 1) for tokens in PROMPTS], DEVICE))
    return joined.run(step_inputs(PROMPTS, [(len(tokens) - 1, len(tokens)) for tokens in PROMPTS], DEVICE))


@pytest.mark.parametrize("joins", [True, False])
def test_padded_decodes_are_those_of_the_step_itself(joins, model):
    expected = read(joined_model(model, joins=joins))
    padded = with_graphs(joined_model(model, joins=joins), max_rows=4 if joins else 1)
    padded.graphs.is_replaying = False
    assert (read(padded) - expected).abs().max() <= 1e-5
    assert padded.graphs is not None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs a recording that fails: without a card every one does")
def test_a_recording_that_fails_is_given_up_and_said(model):
    expected = read(joined_model(model))
    joined = with_graphs(joined_model(model))
    with pytest.warns(UserWarning, match="launched kernel by kernel"):
        found = read(joined)
    assert (found - expected).abs().max() <= 1e-5
    assert joined.graphs.gave_up
    assert torch.equal(read(joined), expected)
    joined = with_graphs(joined)
    with pytest.warns(UserWarning, match="launched kernel by kernel"):
        joined.capture()
    assert joined.graphs.gave_up


def test_a_model_whose_rotary_table_depends_on_the_length_is_not_recorded():
    config = MUST_SHOW["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    joined = joined_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE))
    joined.capture_decodes(joined.attention.for_decodes(max_rows=4, max_context=MAX_CONTEXT))
    assert joined.graphs is None
