"""Tiny models of the families that people run, natively or not, by the model_type of their config."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from tiny_causal import CannotBuild, small_config, with_random_weights
from tiny_models import CONFIGS, tiny_model
from tiny_vision_models import KINDS, tiny_vision_model
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Decoders of our own, one tiny model for each.
MADE_BY_TYPE: dict[str, Callable[[], PreTrainedModel]] = {}
for _name, _config in CONFIGS.items():
    MADE_BY_TYPE.setdefault(_config().model_type, lambda name=_name: tiny_model(name))
for _name, _kind in KINDS.items():
    MADE_BY_TYPE.setdefault(_kind.config().model_type, lambda name=_name: tiny_vision_model(name))

# Others that are downloaded, or were announced to be.
FIELD = (
    *("bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3n", "gemma4_unified"),
    *("glm4_moe_lite", "glm5_next", "glm_moe_dsa", "granite_swa", "hy_v3", "hy_v4", "kimi_k25", "kimi_linear"),
    *("laguna", "lfm2_vl", "llama4", "longcat_flash", "mellum", "mimo_v2_flash", "minimax_m3_vl", "mistral4"),
    *("muse_glimmer", "muse_spark", "olmo_hybrid", "qwen2_moe", "qwen4_exp", "step3p7"),
)


def field_model(model_type: str) -> PreTrainedModel:
    """Made from the default config of its class, reduced in its sizes alone, where there is no tiny model of it."""
    if make := MADE_BY_TYPE.get(model_type):
        return make()
    try:
        config = CONFIG_MAPPING[model_type]()
        images = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        found = images or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model_class = found[0] if isinstance(found, (list, tuple)) else found
        return with_random_weights(model_class, small_config(config))
    except CannotBuild:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CannotBuild(f"no small config of it makes a model: {first[:160]}") from error
