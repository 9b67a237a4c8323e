"""Tiny random encoder-decoder models, made with transformers: the reference that the source lane is held to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tiny_models import VOCABULARY, save_tokenizer
from transformers import PretrainedConfig, PreTrainedModel

_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 112,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 4500,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "scale_embedding": True,
}
_GEMMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 13,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LED = _BART | {
    "decoder_attention_heads": 4,
    "max_encoder_position_embeddings": 4800,
    "max_decoder_position_embeddings": 160,
    "attention_window": [12, 6, 12],
}
_PEGASUS_X = _BART | {"decoder_attention_heads": 4, "block_size": 16, "num_global_tokens": 5}


def _config(class_name: str, values: dict, **others) -> PretrainedConfig:
    return getattr(transformers, class_name)(**(values | others))


SEQ2SEQ: dict[str, Callable[[], PretrainedConfig]] = {
    "t5": lambda: _config("T5Config", _T5),
    "t5-gated-untied": lambda: _config("T5Config", _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": lambda: _config("MT5Config", _T5),
    "umt5": lambda: _config("UMT5Config", _T5),
    "bart": lambda: _config("BartConfig", _BART),
    "mbart": lambda: _config("MBartConfig", _BART),
    "pegasus": lambda: _config("PegasusConfig", _BART),
    "marian": lambda: _config("MarianConfig", _BART),
    "m2m100": lambda: _config("M2M100Config", _BART, max_position_embeddings=160),  # a table of sines that grows
    # Made for long sources: rows see the keys near them, and sums or tokens that all rows see.
    "led": lambda: _config("LEDConfig", {k: v for k, v in _LED.items() if k != "max_position_embeddings"}),
    "longt5-local": lambda: _config("LongT5Config", _T5, local_radius=7),
    "longt5-global": lambda: _config(
        "LongT5Config", _T5, local_radius=7, global_block_size=5, encoder_attention_type="transient-global"
    ),
    "pegasus-x": lambda: _config("PegasusXConfig", _PEGASUS_X),
    "pegasus-x-without-stagger": lambda: _config(
        "PegasusXConfig", _PEGASUS_X, block_size=6, stagger_local_blocks=False
    ),
    "t5gemma": lambda: _config(
        "T5GemmaConfig", {}, encoder=_GEMMA, decoder=_GEMMA | {"num_hidden_layers": 3}, vocab_size=VOCABULARY
    ),
}


def tiny_seq2seq(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, large enough that attention is far from uniform and norms are far from one."""
    return randomized(SEQ2SEQ[name](), seed=seed, dtype=dtype)


def randomized(config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    # Some releases hand softcaps to a kernel that leaves them out; the eager path is what the config says.
    kind = {"attn_implementation": "eager"} if hasattr(config, "encoder") else {}
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, **kind).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue  # tables of sines
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
            if name.endswith(".q.weight"):
                parameter.mul_(_T5["d_kv"] ** -0.5)  # T5 does not scale its scores: its weights hold the scale
    return model.to(dtype)


def save_tiny_seq2seq(name: str, folder: Path, **values) -> PreTrainedModel:
    model = tiny_seq2seq(name, **values)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
