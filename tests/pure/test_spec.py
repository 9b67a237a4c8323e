"""What the decoders of the native families are made of, from their configs alone."""

import pytest
from family_sizes import MORE, SIZES

from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.models.families import FAMILIES
from penstock.models.layer_specs import state_bytes
from penstock.models.spec import decoder_spec


def spec_of(model_type, **values):
    return decoder_spec(SIZES | MORE.get(model_type, {}) | values | {"model_type": model_type})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_a_spec_whose_parts_agree(model_type):
    spec = spec_of(model_type)
    assert (spec.family, spec.num_layers, spec.hidden_size) == (model_type, 4, 64)
    if model_type == "falcon_h1":
        assert spec.num_attention_layers == len(spec.recurrent_layers) == spec.num_layers
    elif model_type == "nemotron_h":
        assert (spec.num_attention_layers, spec.recurrent_layers, spec.num_mixed) == (1, (0,), 2)
    else:
        assert spec.num_attention_layers + len(spec.recurrent_layers) == spec.num_layers == spec.num_mixed
    assert (spec.recurrent is None) == (not spec.recurrent_layers)
    num_projected = 1 if spec.widest_layer.keys_are_values else 2
    assert spec.qkv_rows >= spec.q_rows + num_projected * spec.num_kv_heads * spec.head_size
    assert spec.widest_mlp >= 40
    assert spec.num_parameters > spec.vocab_size * spec.hidden_size
    assert spec.rotary_variant(10) == spec.rotary_variant(500) or spec.depends_on_prompt_length


def test_windows_lie_where_the_family_says():
    assert [layer.window for layer in spec_of("mistral", sliding_window=9).layers] == [9] * 4
    assert [layer.window for layer in spec_of("gemma2").layers] == [13, None] * 2
    gemma3 = spec_of("gemma3_text").layers
    assert [(layer.window, layer.rotary) for layer in gemma3] == [(13, "local"), (None, "global")] * 2
    mixed = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2}
    assert [layer.window for layer in spec_of("qwen2", **mixed).layers] == [None, None, 11, 11]
    assert [layer.window for layer in spec_of("qwen2", **mixed | {"use_sliding_window": False}).layers] == [None] * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    windows = {"sliding_window": 5, "layer_types": kinds}
    assert [layer.window for layer in spec_of("qwen3", use_sliding_window=True, **windows).layers] == [None, 5] * 2
    assert [layer.window for layer in spec_of("qwen3", **windows).layers] == [None] * 4  # as its class reads it


def test_only_layers_with_a_window_are_rotated_where_the_family_says_so():
    for model_type in ("cohere2", "exaone4"):
        layers = spec_of(model_type, sliding_window=9).layers
        assert [(layer.window, layer.rotary) for layer in layers] == [(9, "global")] * 3 + [(None, None)]
    assert {layer.rotary for layer in spec_of("exaone4", sliding_window=None).layers} == {"global"}
    olmo3 = spec_of("olmo3", rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_theta=10_000.0)
    assert [(layer.window, layer.rotary) for layer in olmo3.layers] == [(4096, "local")] * 3 + [(None, "global")]
    assert [(rotary.type, rotary.theta) for rotary in olmo3.rotaries.values()] == [("yarn", 1e4), ("default", 5e5)]


def test_some_layers_have_no_rotation_experts_or_attention():
    assert [layer.rotary for layer in spec_of("smollm3", no_rope_layer_interval=2).layers] == ["global", None] * 2
    assert spec_of("smollm3", no_rope_layers=[0, 1, 1, 1]).layers[0].rotary is None
    moe = spec_of("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=1)
    assert [layer.has_experts for layer in moe.layers] == [True, False, True, True]
    assert spec_of("bamba").recurrent_layers == (0, 2, 3)
    assert spec_of("qwen3_next").recurrent_layers == (0, 1, 2)
    assert spec_of("granitemoehybrid", num_local_experts=0).experts is None


def test_a_state_has_the_bytes_of_its_matrices_and_of_its_last_inputs():
    for model_type in ("qwen3_5_text", "bamba", "lfm2"):
        spec = spec_of(model_type).recurrent
        small, large = (state_bytes(spec, dtype_bytes) for dtype_bytes in (2, 4))
        assert 0 < small < large
        assert spec.widest_rows > 0
        assert all(number >= 0 for number in spec.values_per_token)


def test_a_long_prompt_has_another_rotary_table_under_longrope():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 96}
    spec = spec_of("phi3", rope_scaling={"rope_type": "longrope", **factors}, original_max_position_embeddings=96)
    assert spec.depends_on_prompt_length
    assert spec.rotary_variant(96) != spec.rotary_variant(97)


@pytest.mark.parametrize(
    ("model_type", "values", "error", "said"),
    [
        ("gpt2", {}, UnsupportedModel, "no native decoder"),
        ("llama", {"hidden_act": "relu6"}, UnsupportedModel, "relu6"),
        ("cohere", {"use_qk_norm": True}, UnsupportedModel, "use_qk_norm = True"),
        ("stablelm", {"use_parallel_residual": True}, UnsupportedModel, "use_parallel_residual = True"),
        ("apertus", {"hidden_act": "silu"}, UnsupportedModel, "not one of xielu"),
        ("glm4", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModel, "dynamic"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, UnsupportedModel, "types of layers"),
        ("nemotron_h", {"moe_latent_size": 32}, UnsupportedModel, "moe_latent_size = 32"),
        ("nemotron_h", {"layers_block_type": ["mlp", "gdn"]}, UnsupportedModel, "kind gdn"),
        ("falcon_h1", {"projectors_bias": True}, UnsupportedModel, "projectors_bias = True"),
        ("llama", {"num_key_value_heads": 3}, InvalidModelFile, "4 heads of 16 over 3"),
        ("llama", {"hidden_size": "wide"}, InvalidModelFile, "wrong kind"),
        ("qwen3", {"layer_types": ["full_attention"]}, InvalidModelFile, "1 layer_types for 4 layers"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, InvalidModelFile, "3 value heads over 2"),
        ("bamba", {"mamba_d_head": 15}, InvalidModelFile, "8 heads of 15"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_its_values(model_type, values, error, said):
    with pytest.raises(error, match=said):
        spec_of(model_type, **values)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_a_missing_size_is_named(name):
    config = {key: value for key, value in SIZES.items() if key != name} | {"model_type": "llama"}
    with pytest.raises(InvalidModelFile, match=f"lacks '{name}'"):
        decoder_spec(config)
