"""Sizes of encoder-decoder models, and what a token of their source holds."""

import pytest

from penstock.errors import InvalidModelFile
from penstock.models.seq2seq_spec import seq2seq_shape, seq2seq_spec

T5 = {"vocab_size": 90, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 90,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 77,
}


def test_both_spellings_are_read():
    t5, bart = seq2seq_spec(T5 | {"feed_forward_proj": "gated-gelu"}), seq2seq_spec(BART)
    assert (t5.encoder.num_layers, t5.decoder.num_layers, t5.encoder.is_gated) == (3, 2, True)
    assert (bart.decoder.num_heads, bart.decoder.intermediate_size, bart.encoder.is_gated) == (2, 48, False)
    assert (bart.max_source, t5.max_positions) == (77, None)
    assert t5.max_source > 10**6
    assert t5.num_passes == 2 * 3 + 1
    assert t5.rotary_variant(5) == "default"


def test_parameters_are_those_of_the_matrices():
    spec = seq2seq_spec(T5)
    attention, mlp = 4 * 32 * 32, 2 * 32 * 64
    assert spec.num_parameters == 3 * (attention + mlp) + 2 * (2 * attention + mlp) + 90 * 32
    assert seq2seq_spec(T5 | {"tie_word_embeddings": False}).num_parameters == spec.num_parameters + 90 * 32


def test_nested_configs_have_a_table_for_each_side():
    part = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    side = part | {"vocab_size": 90, "rope_theta": 1e4, "hidden_activation": "gelu", "attn_logit_softcapping": 5.0}
    spec = seq2seq_spec({"encoder": side, "decoder": side})
    assert (spec.vocab_size, spec.num_token_tables, spec.num_table_positions) == (90, 2, 0)
    assert seq2seq_shape(spec, 4).attends_through_scores


def test_a_shape_counts_given_weights_and_its_own():
    spec = seq2seq_spec(BART)
    assert seq2seq_shape(spec, 4).num_parameters == spec.num_parameters
    assert seq2seq_shape(spec, 2, num_parameters=7).num_parameters == 7
    assert seq2seq_shape(spec, 4).state_bytes_per_token > seq2seq_shape(spec, 2).state_bytes_per_token > 0


def test_a_missing_size_is_refused_with_its_names():
    with pytest.raises(InvalidModelFile, match="no encoder_ffn_dim or d_ff"):
        seq2seq_spec({name: value for name, value in BART.items() if name != "encoder_ffn_dim"})


def test_an_encoder_for_long_sources_has_positions_of_its_own_and_looks_at_scores():
    longer = {"attention_window": 8, "max_encoder_position_embeddings": 512, "max_decoder_position_embeddings": 60}
    spec = seq2seq_spec({name: value for name, value in BART.items() if "position" not in name} | longer)
    assert (spec.max_source, spec.num_table_positions) == (512, 572)
    assert seq2seq_shape(spec, 4).attends_through_scores
    assert spec.encoder.num_attention_parameters > spec.decoder.num_attention_parameters
