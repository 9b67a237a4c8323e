"""Tiny random image-text models of every kind that is promised, and prompts as their processors would return them."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, prompt, save_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

IMAGE_TOKEN = 190
VIDEO_TOKEN = 191
VISION_START_TOKEN = 192
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}


def _text(kind: str, **values: Any) -> PretrainedConfig:
    return transformers.AutoConfig.for_model(kind, **(_TEXT | values))


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _squares() -> dict[str, torch.Tensor]:
    return {"pixel_values": _images(2, 3, 32, 32)}


def _tiles() -> dict[str, torch.Tensor]:
    """One sample with two images and a tile of padding, as a batch of unlike samples would have."""
    pixels = _images(1, 3, 3, 32, 32)
    pixels[0, 2] = 0
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 3, 32, 32, dtype=torch.bool)}


def _grids() -> dict[str, torch.Tensor]:
    grids = torch.tensor([[1, 8, 8], [1, 4, 12]])
    return {"pixel_values": _images(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grids}


def _sizes() -> dict[str, torch.Tensor]:
    """Images of two sizes, padded to one."""
    pixels = _images(2, 3, 32, 32)
    pixels[1, :, 16:] = 0
    pixels[1, :, :, 24:] = 0
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32], [16, 24]])}


def _two_of_a_sample() -> dict[str, torch.Tensor]:
    sizes = torch.tensor([[32, 64], [32, 32]])
    return {
        "pixel_values": _images(2, 1, 3, 32, 32),
        "image_sizes": sizes,
        "batch_num_images": torch.tensor([2]),
    }


def _qwen2_5_vl() -> PretrainedConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": _MROPE},
        vision_config=_QWEN_VISION | {"depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START_TOKEN,
    )


def _qwen3_vl() -> PretrainedConfig:
    return transformers.Qwen3VLConfig(
        text_config=_TEXT | {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}},
        vision_config=_QWEN_VISION | {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START_TOKEN,
    )


def _qwen3_vl_moe() -> PretrainedConfig:
    config = _qwen3_vl()
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text = _TEXT | {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}, **experts}
    return transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=config.vision_config.to_dict() | {"model_type": "qwen3_vl_moe_vision"},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START_TOKEN,
    )


def _qwen3_5(kind: str, **experts: int) -> PretrainedConfig:
    """Three layers with a gated delta rule to one with attention, of whose heads a quarter is rotated."""
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    return getattr(transformers, kind)(
        text_config=_TEXT
        | {"head_dim": 32, "rope_parameters": rotary | {"mrope_section": [1, 2, 1], "mrope_interleaved": True}}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | experts,
        vision_config=_QWEN_VISION | {"depth": 3, "num_position_embeddings": 64},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START_TOKEN,
    )


def _qwen3_5_moe() -> PretrainedConfig:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _qwen3_5("Qwen3_5MoeConfig", **experts, shared_expert_intermediate_size=20)


def _gemma3() -> PretrainedConfig:
    return transformers.Gemma3Config(
        text_config=_TEXT | {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 13, "num_hidden_layers": 7},
        vision_config=_VIT,
        mm_tokens_per_image=16,
        image_token_id=IMAGE_TOKEN,
    )


def _idefics3(kind: str) -> PretrainedConfig:
    return getattr(transformers, kind)(
        text_config=_text("llama"), vision_config=_VIT, image_token_id=IMAGE_TOKEN, scale_factor=2, pad_token_id=0
    )


def _llava() -> PretrainedConfig:
    vision = transformers.CLIPVisionConfig(**_VIT)
    return transformers.LlavaConfig(text_config=_text("llama"), vision_config=vision, image_token_id=IMAGE_TOKEN)


def _llava_onevision() -> PretrainedConfig:
    return transformers.LlavaOnevisionConfig(
        text_config=_text("qwen2"),
        vision_config=transformers.SiglipVisionConfig(**_VIT),
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )


def _mistral3() -> PretrainedConfig:
    vision = transformers.PixtralVisionConfig(**(_VIT | {"patch_size": 4, "head_dim": 8}))
    return transformers.Mistral3Config(
        text_config=_text("mistral", sliding_window=None, head_dim=16),
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _ministral3() -> PretrainedConfig:
    """Its queries grow with the position, here from token 16 on; so in Ministral 3 and Devstral 2."""
    config = _mistral3().to_dict()
    rotary = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    scaled = rotary | {"llama_4_scaling_beta": 0.3, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    text = _text("ministral3", head_dim=16, rope_parameters=scaled | {"mscale_all_dim": 1.0})
    return transformers.Mistral3Config(**config | {"text_config": text.to_dict()})


def _gemma4(**values: Any) -> PretrainedConfig:
    """Images see themselves in layers with a window; heads of the others are larger, and their keys are values."""
    heads = {"head_dim": 24, "global_head_dim": 40, "num_global_key_value_heads": 1, "sliding_window": 13}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": True}
    others = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    tower = {name: _VIT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    tower |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    return transformers.Gemma4Config(
        text_config=_TEXT | heads | layers | others | values,
        vision_config=tower | {"pooling_kernel_size": 3, "patch_size": 4},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        audio_token_id=VIDEO_TOKEN + 2,
    )


def _gemma4_e() -> PretrainedConfig:
    """Images see what comes before alone; layers have inputs of their own, and the last ones keys of earlier ones."""
    inputs = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False}
    return _gemma4(**inputs, **shared, use_bidirectional_attention=None)


def _places() -> dict[str, torch.Tensor]:
    """Patches with their places, of a square and of a wide image, padded to as many."""
    places = [torch.cartesian_prod(torch.arange(height), torch.arange(9)).flip(-1) for height in (9, 6)]
    padded = [torch.nn.functional.pad(one, (0, 0, 0, 81 - len(one)), value=-1) for one in places]
    pixels = _images(2, 81, 48).sigmoid()
    pixels[1, len(places[1]) :] = 0
    return {"pixel_values": pixels, "image_position_ids": torch.stack(padded)}


def _lfm2_vl() -> PretrainedConfig:
    layers = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 32}
    tower = {name: _VIT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return transformers.Lfm2VlConfig(
        text_config=_text("lfm2", **layers).to_dict(),
        vision_config=tower
        | {"num_attention_heads": 4, "num_patches": 16, "patch_size": 4, "model_type": "siglip2_vision_model"},
        image_token_id=IMAGE_TOKEN,
        projector_hidden_size=48,
    )


def _shapes() -> dict[str, torch.Tensor]:
    """Patches of a square and of a wide image, padded to as many."""
    shapes = torch.tensor([[6, 6], [4, 8]])
    is_patch = torch.arange(36)[None] < shapes.prod(-1)[:, None]
    pixels = _images(2, 36, 48) * is_patch[..., None]
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": is_patch.long()}


def _internvl() -> PretrainedConfig:
    vision = transformers.InternVLVisionConfig(**(_VIT | {"image_size": [32, 32], "patch_size": [8, 8]}))
    return transformers.InternVLConfig(
        text_config=_text("qwen2"), vision_config=vision, image_token_id=IMAGE_TOKEN, downsample_ratio=0.5
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    config: Callable[[], PretrainedConfig]
    images: Callable[[], dict[str, torch.Tensor]]  # the processor's tensors for two images
    tower: str  # the module that encodes


KINDS = {
    "qwen2.5-vl": Kind(config=_qwen2_5_vl, images=_grids, tower="model.visual"),
    "qwen3-vl": Kind(config=_qwen3_vl, images=_grids, tower="model.visual"),
    "qwen3-vl-moe": Kind(config=_qwen3_vl_moe, images=_grids, tower="model.visual"),
    "qwen3.5": Kind(config=lambda: _qwen3_5("Qwen3_5Config"), images=_grids, tower="model.visual"),
    "qwen3.5-moe": Kind(config=_qwen3_5_moe, images=_grids, tower="model.visual"),
    "gemma3": Kind(config=_gemma3, images=_squares, tower="model.vision_tower"),
    "gemma4": Kind(config=_gemma4, images=_places, tower="model.vision_tower"),
    "gemma4-e": Kind(config=_gemma4_e, images=_places, tower="model.vision_tower"),
    "smolvlm": Kind(config=lambda: _idefics3("SmolVLMConfig"), images=_tiles, tower="model.vision_model"),
    "idefics3": Kind(config=lambda: _idefics3("Idefics3Config"), images=_tiles, tower="model.vision_model"),
    "lfm2-vl": Kind(config=_lfm2_vl, images=_shapes, tower="model.vision_tower"),
    "llava": Kind(config=_llava, images=_squares, tower="model.vision_tower"),
    "llava-onevision": Kind(config=_llava_onevision, images=_two_of_a_sample, tower="model.vision_tower"),
    "mistral3": Kind(config=_mistral3, images=_sizes, tower="model.vision_tower"),
    "ministral3": Kind(config=_ministral3, images=_sizes, tower="model.vision_tower"),
    "internvl": Kind(config=_internvl, images=_squares, tower="model.vision_tower"),
}

# The other kinds have mechanisms of these; through the library's own steps, hybrids and experts take too long.
ON_EVERY_LANE = [
    name for name in KINDS if name not in ("qwen3-vl-moe", "qwen3.5", "qwen3.5-moe", "ministral3", "gemma4-e")
]


def tiny_vision_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(KINDS[name].config()).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


@torch.no_grad()
def processed_prompt(name: str, model: PreTrainedModel, *, num_text: tuple[int, int, int] = (11, 5, 23)) -> dict:
    """Text, an image, text, an image, text: ids with expanded placeholders, and what else the processor returns."""
    images = KINDS[name].images()
    features = model.base_model.get_image_features(**images, return_dict=True).pooler_output
    rows = [one.flatten(0, -2).shape[0] for one in features]
    if len(rows) == 1:
        rows = [rows[0] // 2] * 2
    texts = [[token for token in prompt(n, seed) if token < IMAGE_TOKEN] for seed, n in enumerate(num_text)]
    if name.startswith("qwen"):
        texts[0].append(VISION_START_TOKEN)
        texts[1].append(VISION_START_TOKEN)
    ids = torch.tensor([[*texts[0], *[IMAGE_TOKEN] * rows[0], *texts[1], *[IMAGE_TOKEN] * rows[1], *texts[2]]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    types = (ids == IMAGE_TOKEN).long()
    if name == "gemma3":
        inputs["token_type_ids"] = types
    if name.startswith(("qwen", "gemma4")):
        inputs["mm_token_type_ids"] = types
    return inputs


def count_images(model, name) -> list[int]:
    """Grows by what each call of the tower encodes: the rows of its first input, or the grids of it."""
    counts: list[int] = []

    def count(module, args, kwargs):
        pixels = kwargs.get("pixel_values", args[0] if args else None)
        grids = kwargs.get("grid_thw")
        counts.append(len(grids) if grids is not None else len(pixels))

    model.get_submodule(KINDS[name].tower).register_forward_pre_hook(count, with_kwargs=True)
    return counts


def tokenizer(**special: str) -> transformers.PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(IMAGE_TOKEN)} | {
        word: IMAGE_TOKEN + i for i, word in enumerate(special.values())
    }
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", pad_token="w0", extra_special_tokens=special
    )


def llava_processor() -> transformers.LlavaProcessor:
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return transformers.LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer(image_token="<image>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def gemma3_processor() -> transformers.Gemma3Processor:
    special = {"image_token": "<img>", "boi_token": "<image>", "eoi_token": "<end>"}
    pixels = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(image_processor=pixels, tokenizer=tokenizer(**special), image_seq_length=16)


def idefics3_processor() -> transformers.Idefics3Processor:
    """Cuts each picture into four tiles beside the whole of it."""
    tiles = {f"tile_{row}{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)}
    special = {"image_token": "<image>", "around": "<fake_token_around_image>", "whole": "<global-img>", **tiles}
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return transformers.Idefics3Processor(image_processor=pixels, tokenizer=tokenizer(**special), image_seq_len=4)


def pictures(num_images: int) -> list[Image.Image]:
    generator = torch.Generator().manual_seed(3)
    return [
        Image.fromarray(torch.randint(0, 256, (40, 30, 3), generator=generator, dtype=torch.uint8).numpy())
        for _ in range(num_images)
    ]


# Made without more libraries; the processors of the other kinds need torchvision.
PROCESSORS: dict[str, Callable[[], Any]] = {
    "llava": llava_processor,
    "gemma3": gemma3_processor,
    "idefics3": idefics3_processor,
}
TEXT = "w1 w2 <image> w3 w4 w5 <image> w6 w7 w8 w9"
TEMPLATE = (
    "{% for message in messages %}{{ ' ' + message['role'] }}{% for part in message['content'] %}"
    "{{ ' <image> ' if part['type'] == 'image' else ' ' + part['text'] }}{% endfor %}{% endfor %} w9"
)


class TensorProcessor:
    """Called as processors are: the two usual pictures become the given tensors, and others get other pixels."""

    image_token = "<image>"

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self.inputs = inputs

    def __call__(self, text, images=(), return_tensors="pt"):
        assert len(images) == text[0].count(self.image_token)
        if _checksum(images) == _checksum(pictures(2)):
            return dict(self.inputs)
        pixels = self.inputs["pixel_values"]
        others = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(_checksum(images)))
        return {**self.inputs, "pixel_values": others * (pixels != 0)}


def _checksum(images: Sequence[Image.Image]) -> int:
    return zlib.crc32(b"".join(image.tobytes() for image in images))


def save_tiny_vision_model(name: str, folder: Path) -> PreTrainedModel:
    """A folder as users have them; where a processor can be made, the folder has it."""
    model = tiny_vision_model(name)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    if name in PROCESSORS:
        processor = PROCESSORS[name]()
        processor.chat_template = TEMPLATE
        processor.save_pretrained(folder)
    return model


def save_with_joined_experts(folder: Path, other: Path, *, inputs_first: bool) -> None:
    """Writes a checkpoint as the first ones of its family are, the experts of a layer in one tensor."""
    shutil.copytree(folder, other, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        experts = name.removesuffix("0.gate_proj.weight")
        parts = {
            part: [tensors.pop(f"{experts}{index}.{part}.weight") for index in range(6)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        tensors[f"{experts}gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{experts}down_proj"] = torch.stack(parts["down_proj"])
    if inputs_first:
        turned = {name: tensors[name].transpose(1, 2).contiguous() for name in tensors if ".experts." in name}
        tensors |= turned
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})


def plain_inputs(name: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What plain transformers is given for TEXT and two pictures."""
    if name in PROCESSORS:
        return dict(PROCESSORS[name]()(text=[TEXT], images=pictures(2), return_tensors="pt"))
    return processed_prompt(name, model)
