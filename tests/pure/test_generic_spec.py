"""Sizes of models that transformers runs, under all the names that configs have for them."""

import json
import struct
from types import SimpleNamespace

import pytest

from penstock.config import EngineConfig
from penstock.errors import InvalidModelFile
from penstock.lanes.generic_text_kind import GENERIC_TEXT
from penstock.lanes.place import Place
from penstock.models.files import resolve
from penstock.models.generic_spec import estimated_parameters, generic_spec, num_stored_parameters

GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}


def test_sizes_are_found_under_their_other_names():
    spec = generic_spec(GPT2)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (32, 4, 4, 4)
    assert (spec.head_size, spec.max_context, spec.num_kv_layers, spec.state_bytes) == (8, 64, 4, 0)
    assert spec == generic_spec({"model_type": "gpt2", "text_config": GPT2})
    assert not spec.depends_on_prompt_length
    assert spec.rotary_variant(10) == "default"
    assert estimated_parameters(spec) == 2 * 50 * 32 + 4 * (32 * 8 * 16 + 3 * 32 * spec.intermediate_size)
    assert spec.largest_matrix == 32 * 2 * spec.intermediate_size


@pytest.mark.parametrize(
    ("kinds", "num_kv_layers"),
    [
        ({"layer_types": ["conv", "full_attention", "conv", "conv"]}, 1),
        ({"attn_layer_indices": [1, 2]}, 2),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, 2),
    ],
)
def test_only_layers_that_attend_keep_keys(kinds, num_kv_layers):
    spec = generic_spec(GPT2 | kinds)
    assert spec.num_kv_layers == num_kv_layers
    assert spec.state_bytes > 0


def test_a_model_without_heads_is_recurrent():
    spec = generic_spec(
        {"model_type": "mamba", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
    )
    assert (spec.num_kv_layers, spec.state_bytes) == (0, 3 * 4 * 64 * (8 + 4))


def test_a_delta_layer_keeps_its_matrix_and_its_last_inputs():
    delta = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    }
    spec = generic_spec(GPT2 | delta | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]})
    assert spec.state_bytes == 3 * 4 * (4 * 8 * 16 + (2 * 2 * 8 + 4 * 16) * 4)


@pytest.mark.parametrize("name", ["vocab_size", "n_embd", "n_layer"])
def test_a_missing_size_is_refused(name):
    with pytest.raises(InvalidModelFile, match="lacks a size"):
        generic_spec({key: value for key, value in GPT2.items() if key != name})


def test_stored_parameters_are_counted_in_the_headers(tmp_path):
    a = {"dtype": "F16", "shape": [3, 4], "data_offsets": [0, 24]}
    b = {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]}
    header = json.dumps({"__metadata__": {}, "a": a, "b": b}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(29))
    found = SimpleNamespace(gguf=None, weight_files=(), folder=tmp_path, why_text_only="")
    assert num_stored_parameters(found) == 17
    path.write_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(InvalidModelFile, match="not a usable safetensors file"):
        num_stored_parameters(found)
    path.unlink()
    assert num_stored_parameters(found) is None


# --- sizes by layer ---

TEXT = {
    "model_type": "mixed",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
KINDS = ["sliding_attention"] * 5 + ["full_attention"]


def test_layers_that_are_alike_cost_the_same():
    spec = generic_spec(TEXT)
    assert spec.is_even
    assert spec.own_kv_values == 6 * 2 * 4 * 32


@pytest.mark.parametrize(
    "wider",
    [
        {"per_layer_config": {"05": {"head_dim": 64}}},
        {"layer_types": KINDS, "global_head_dim": 64},
    ],
)
def test_a_layer_with_larger_heads_is_counted_as_it_is(wider):
    spec = generic_spec(TEXT | wider)
    assert not spec.is_even
    assert spec.own_kv_values == 5 * 2 * 4 * 32 + 2 * 4 * 64
    assert spec.head_size == 64


@pytest.mark.parametrize(
    ("fewer", "num_last"),
    [
        ({"per_layer_config": {"5": {"num_key_value_heads": 1}}}, 1),
        ({"num_key_value_heads": [4, 4, 4, 4, 4, 2]}, 2),
        ({"layer_types": KINDS, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, 1),
        ({"layer_types": KINDS, "num_global_key_value_heads": 1, "attention_k_eq_v": False}, 4),
    ],
)
def test_a_layer_with_fewer_keys_is_counted_as_it_is(fewer, num_last):
    assert generic_spec(TEXT | fewer).own_kv_values == 5 * 2 * 4 * 32 + 2 * num_last * 32


def test_layers_that_take_the_keys_of_others_keep_none():
    assert generic_spec(TEXT | {"num_kv_shared_layers": 2}).own_kv_values == 4 * 2 * 4 * 32


def test_widths_that_are_listed_count_as_the_largest():
    assert generic_spec(TEXT | {"intermediate_size": [512] * 5 + [1024]}).intermediate_size == 1024


def test_lists_that_are_too_short_are_refused_with_the_type():
    with pytest.raises(InvalidModelFile, match="mixed model"):
        generic_spec(TEXT | {"num_key_value_heads": [4, 4]})


def test_a_model_whose_layers_differ_is_planned_with_its_own_cache(tmp_path):
    """Pages hold keys of one size, so before any check the plan knows that there will be none."""
    config = TEXT | {"per_layer_config": {"05": {"head_dim": 64}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = generic_spec(config)
    files = resolve(str(tmp_path), weights=False)
    place = Place(
        files=files,
        lane=GENERIC_TEXT.facts,
        config=EngineConfig(),
        device="cpu",
        dtype="float32",
        budget_bytes=10**9,
    )
    memory = GENERIC_TEXT.price(place, None)
    assert memory.shape.kv_bytes_per_token == spec.own_kv_values * 4


def test_layers_that_are_listed_are_counted():
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 90}
    spec = generic_spec(
        {"model_type": "nemotron_h", "layers_block_type": kinds, "max_position_embeddings": 64, **sizes}
    )
    assert (spec.num_layers, spec.num_kv_layers) == (4, 1)
