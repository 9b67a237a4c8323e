"""Image-text models whose decoder runs natively: which they are, and the config of their text part. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from penstock.models.families import FAMILIES
from penstock.models.files import ModelFiles
from penstock.models.spec import DecoderSpec, decoder_spec

# What images see: only what comes before, or all of their own span.
SEE_BEFORE = ("llava", "llava_onevision", "smolvlm", "idefics3", "mistral3", "internvl", "lfm2_vl")
SEE_BEFORE += ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SEE_SPANS = ("gemma3", "gemma4")
NATIVE_MEDIA = (*SEE_BEFORE, *SEE_SPANS)
# What a text part must say itself; where one is missing, the library's defaults hold and it is asked.
REQUIRED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
REQUIRED += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters")


def sight_of(config: Mapping[str, Any]) -> Literal["causal", "span"]:
    """Gemma 4 says of each model whether its images see themselves; those of its small ones do not."""
    kind, text = str(config["model_type"]), config.get("text_config") or {}
    is_blind = kind == "gemma4" and text.get("use_bidirectional_attention") != "vision"
    return "span" if kind in SEE_SPANS and not is_blind else "causal"


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The decoder's config as the file says it; None where the file leaves values to the library."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return None
    family = FAMILIES.get(str(text.get("model_type")))
    own_names = {} if family is None else family.keys
    missing = {name for name in REQUIRED if text.get(own_names.get(name, name)) is None}
    if missing - ({"rope_parameters"} if "rope_scaling" in text and "rope_theta" in text else set()):
        return None
    if str(text["model_type"]).startswith("gemma3") and "head_dim" not in text:
        return None
    return {**text, **_tied(config)}


def media_text_config(files: ModelFiles) -> dict[str, Any]:
    return text_part(files.config) or library_text_config(files)


def library_text_config(files: ModelFiles) -> dict[str, Any]:
    """The decoder's config as the library completes it."""
    from penstock.foreign.pretrained import image_text_class

    config = image_text_class(files)[1]
    return config.get_text_config().to_dict() | _tied(config.to_dict())


def _tied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the head is the embeddings is said beside the parts, and holds over what the text part says."""
    tied = config.get("tie_word_embeddings")
    return {} if tied is None else {"tie_word_embeddings": tied}


def in_eight_bits(quantization: object) -> bool:
    """Tells whether matrices are stored as eight-bit floats with scales, which our own reader expands."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"


def media_decoder_spec(files: ModelFiles) -> DecoderSpec:
    return decoder_spec(media_text_config(files))


def num_deepstack_layers(config: Mapping[str, Any]) -> int:
    """Decoder layers that add features of their own to an image's rows."""
    vision = config.get("vision_config")
    return len(vision.get("deepstack_visual_indexes") or ()) if isinstance(vision, Mapping) else 0
