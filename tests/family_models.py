"""Random models of every native family at a small but realistic shape, saved as users have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PretrainedConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

VOCABULARY = 49_152
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START_TOKEN = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN = 10, VOCABULARY - 10

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
_DEEPSEEK = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_DELTA = {
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_n_groups": 1}
_CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"] * 2
_VIT = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
_QWEN_VISION = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_heads": 6,
    "depth": 6,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 512,
}
_MROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [8, 12, 12]}
_IMAGE_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START_TOKEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    config: Callable[[], PretrainedConfig]
    image: dict[str, Any] | None = None  # a processor's tensors of one picture, by their shapes; None: text only
    image_tokens: int = 0


def _text(name: str, **values: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, name)(**(_TEXT | values))


def _llava() -> PretrainedConfig:
    vision = transformers.CLIPVisionConfig(**_VIT, image_size=336, patch_size=14)
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT), vision_config=vision, image_token_id=IMAGE_TOKEN
    )


def _smolvlm() -> PretrainedConfig:
    return transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=_VIT | {"image_size": 384, "patch_size": 16},
        image_token_id=IMAGE_TOKEN,
        scale_factor=3,
        pad_token_id=0,
    )


def _gemma3() -> PretrainedConfig:
    return transformers.Gemma3Config(
        text_config=_TEXT | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 512},
        vision_config=_VIT | {"image_size": 448, "patch_size": 14},
        mm_tokens_per_image=256,
        image_token_id=IMAGE_TOKEN,
    )


def _qwen2_5_vl() -> PretrainedConfig:
    vision = _QWEN_VISION | {"window_size": 112, "fullatt_block_indexes": [2, 5]}
    return transformers.Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": _MROPE}, vision_config=vision, **_IMAGE_IDS
    )


def _qwen3_vl() -> PretrainedConfig:
    rope = _MROPE | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    vision = _QWEN_VISION | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [1, 3]}
    return transformers.Qwen3VLConfig(
        text_config=_TEXT | {"head_dim": 64, "rope_parameters": rope}, vision_config=vision, **_IMAGE_IDS
    )


_GRID = {"pixel_values": (32 * 32, 3 * 2 * 14 * 14), "image_grid_thw": [1, 32, 32]}

FAMILIES: dict[str, Family] = {
    "llama": Family(config=_text("LlamaConfig")),
    "qwen3-moe": Family(config=_text("Qwen3MoeConfig", **_EXPERTS, head_dim=64)),
    "mixtral": Family(config=_text("MixtralConfig", num_local_experts=8, num_experts_per_tok=2, intermediate_size=512)),
    "gpt-oss": Family(
        config=_text("GptOssConfig", num_local_experts=8, num_experts_per_tok=2, head_dim=64, intermediate_size=512)
    ),
    "qwen3-next": Family(
        config=_text("Qwen3NextConfig", **_EXPERTS, **_DELTA, shared_expert_intermediate_size=512),
    ),
    "qwen3.5": Family(config=_text("Qwen3_5TextConfig", **_DELTA)),
    "bamba": Family(config=_text("BambaConfig", **_MAMBA, attn_layer_indices=[3, 7])),
    "granite-hybrid": Family(
        config=_text(
            "GraniteMoeHybridConfig",
            **_MAMBA,
            num_local_experts=8,
            num_experts_per_tok=2,
            shared_intermediate_size=512,
            intermediate_size=512,
            layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        )
    ),
    "deepseek-v2": Family(config=_text("DeepseekV2Config", **_DEEPSEEK, **_LATENT)),
    "glm4-moe-lite": Family(config=_text("Glm4MoeLiteConfig", **_DEEPSEEK, **_LATENT)),
    "ministral3": Family(config=_text("Ministral3Config", head_dim=64)),
    "olmo3": Family(config=_text("Olmo3Config", sliding_window=512)),
    "granite": Family(config=_text("GraniteConfig", residual_multiplier=0.5)),
    "ernie4.5": Family(config=_text("Ernie4_5Config", head_dim=64)),
    "exaone4": Family(config=_text("Exaone4Config", sliding_window=512)),
    "cohere2": Family(config=_text("Cohere2Config", sliding_window=512)),
    "glm4": Family(config=_text("Glm4Config", head_dim=64)),
    "hunyuan": Family(config=_text("HunYuanDenseV1Config", head_dim=64)),
    "arcee": Family(config=_text("ArceeConfig")),
    "apertus": Family(config=_text("ApertusConfig")),
    "nemotron": Family(config=_text("NemotronConfig", head_dim=64)),
    "starcoder2": Family(config=_text("Starcoder2Config", sliding_window=512)),
    "lfm2": Family(config=_text("Lfm2Config", layer_types=_CONVOLUTIONS)),
    "lfm2-moe": Family(
        config=_text("Lfm2MoeConfig", **_EXPERTS, layer_types=_CONVOLUTIONS, rope_parameters={"rope_type": "default"})
    ),
    "nemotron-h": Family(
        config=_text(
            "NemotronHConfig",
            layers_block_type=["linear_attention", "mlp", "linear_attention", "moe", "full_attention", "mlp"] * 2,
            head_dim=64,
            mamba_num_heads=16,
            ssm_state_size=64,
            n_groups=2,
            n_routed_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=512,
            moe_shared_expert_intermediate_size=512,
        )
    ),
    "glm4-moe": Family(config=_text("Glm4MoeConfig", **_DEEPSEEK, head_dim=64, n_shared_experts=1)),
    "dots1": Family(config=_text("Dots1Config", **_DEEPSEEK, head_dim=64, n_shared_experts=1)),
    "minimax-m2": Family(
        config=_text(
            "MiniMaxM2Config",
            head_dim=64,
            num_local_experts=16,
            num_experts_per_tok=4,
            intermediate_size=512,
            rotary_dim=32,
        )
    ),
    "ernie4.5-moe": Family(
        config=_text("Ernie4_5_MoeConfig", head_dim=64, moe_num_experts=16, moe_k=4, moe_intermediate_size=512)
    ),
    "falcon-h1": Family(config=_text("FalconH1Config", **_MAMBA, mamba_d_ssm=1024)),
    "llava": Family(config=_llava, image={"pixel_values": (1, 3, 336, 336)}, image_tokens=576),
    "smolvlm": Family(config=_smolvlm, image={"pixel_values": (1, 1, 3, 384, 384)}, image_tokens=64),
    "gemma3": Family(config=_gemma3, image={"pixel_values": (1, 3, 448, 448)}, image_tokens=256),
    "qwen2.5-vl": Family(config=_qwen2_5_vl, image=_GRID, image_tokens=256),
    "qwen3-vl": Family(config=_qwen3_vl, image=_GRID, image_tokens=256),
}


def save_family(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    auto = transformers.AutoModelForCausalLM if family.image is None else transformers.AutoModelForImageTextToText
    model = auto.from_config(family.config())
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", pad_token="w0", extra_special_tokens={"image_token": "<image>"}
    )
    if name == "llava":
        _llava_processor(tokenizer).save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)


def _llava_processor(tokenizer: Any) -> transformers.LlavaProcessor:
    return transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def text_tokens(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN, (num_tokens,), generator=generator).tolist()


class PictureProcessor:
    """Called as processors are. Some real ones need libraries that are not everywhere; pixels are random here."""

    image_token = "<image>"

    def __init__(self, family: Family, num_text: int) -> None:
        self.family = family
        self.num_text = num_text

    def __call__(self, text: list[str], images: list[Any], return_tensors: str = "pt") -> dict[str, torch.Tensor]:
        """Each picture, then its share of the text."""
        ids: list[int] = []
        for index in range(len(images)):
            ids += [VISION_START_TOKEN, *[IMAGE_TOKEN] * self.family.image_tokens]
            ids += text_tokens(self.num_text // len(images), seed=index)
        tensors = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        return tensors | self._pixels(len(images))

    def _pixels(self, num_images: int) -> dict[str, torch.Tensor]:
        assert self.family.image is not None
        generator = torch.Generator().manual_seed(7)
        shape = self.family.image["pixel_values"]
        is_batch_of_tiles = len(shape) == 5
        shape = (1, num_images, *shape[2:]) if is_batch_of_tiles else (num_images * shape[0], *shape[1:])
        tensors = {"pixel_values": torch.randn(shape, generator=generator)}
        if is_batch_of_tiles:
            tensors["pixel_attention_mask"] = torch.ones(1, num_images, *shape[-2:], dtype=torch.bool)
        if "image_grid_thw" in self.family.image:
            tensors["image_grid_thw"] = torch.tensor([self.family.image["image_grid_thw"]] * num_images)
        return tensors


def pictures(num_images: int) -> list[Image.Image]:
    """Their pixels come from the processor above; these only count."""
    return [Image.new("RGB", (4, 4)) for _ in range(num_images)]
