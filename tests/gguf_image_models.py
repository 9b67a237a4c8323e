"""Tiny image-text models as two GGUF files, a text part and a tower, laid out as the converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import gguf_models
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_models import write_gguf
from safetensors.torch import save_file
from tiny_vision_models import IMAGE_TOKEN, tiny_vision_model
from transformers import PreTrainedModel

PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
QWEN = {PAD: IMAGE_TOKEN, "<|video_pad|>": IMAGE_TOKEN + 1, START: IMAGE_TOKEN + 2, END: IMAGE_TOKEN + 3}
GEMMA = {"<image_soft_token>": IMAGE_TOKEN, "<start_of_image>": IMAGE_TOKEN + 1, "<end_of_image>": IMAGE_TOKEN + 2}
PROJECTORS = {"qwen3-vl": "qwen3vl_merger", "qwen3-vl-moe": "qwen3vl_merger", "qwen2.5-vl": "qwen2.5vl_merger"}
PROJECTORS |= {"gemma3": "gemma3"}
ARCHITECTURES = {"qwen3-vl": "qwen3vl", "qwen3-vl-moe": "qwen3vlmoe", "qwen2.5-vl": "qwen2vl", "gemma3": "gemma3"}
IMAGE = {"gemma3": "<start_of_image>"}
MEAN, DEVIATION = [0.5, 0.4, 0.3], [0.5, 0.6, 0.7]


def image_model(name: str) -> PreTrainedModel:
    model = tiny_vision_model(name)
    config = model.config
    if name == "gemma3":
        del model.model.vision_tower.head
        model.model.vision_tower.use_head = False
        config.vision_config.vision_use_head = False
        for layer in model.model.language_model.layers:  # as all but the largest have it
            layer.self_attn.scaling = config.text_config.head_dim**-0.5
    return model.eval()


def write_image_model(
    name: str, folder: Path, kind: Quant = Quant.F32, *, tower: str = "mmproj-model.gguf", **changes: Any
) -> tuple[PreTrainedModel, Path]:
    """Gives the model and the GGUF of its text part; `changes` are of the tower's metadata, None leaves one out."""
    model = image_model(name)
    text = folder / "text"
    text.mkdir(parents=True)
    config = model.config.get_text_config().to_dict() | {"tie_word_embeddings": model.config.tie_word_embeddings}
    (text / "config.json").write_text(json.dumps(config))
    tensors = {key.replace("language_model.", ""): one for key, one in model.state_dict().items() if is_text(key)}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    save_file({key: one.clone().contiguous() for key, one in tensors.items()}, text / "model.safetensors")
    special = GEMMA if name == "gemma3" else QWEN
    rope: dict[str, Any] = {}
    if name == "gemma3":
        rope = {"attention.sliding_window": config["sliding_window"], "rope.freq_base": 1_000_000.0}
    else:
        rope = {"rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0]}
    with patch.object(gguf_models, "add_tokenizer", lambda writer, size: _add_tokenizer(writer, size, special)):
        path = write_gguf(text, ARCHITECTURES[name], folder / "model.gguf", kind, **rope)
    write_tower(name, model, folder / tower, **changes)
    return model, path


def is_text(key: str) -> bool:
    return "language_model." in key or key.startswith("lm_head")


def _add_tokenizer(writer: gguf.GGUFWriter, size: int, special: dict[str, int]) -> None:
    """Letters are tokens of their own."""
    letters = "abcdefghijklmnopqrstuvwxyzĠ"
    names = {index: token for token, index in special.items()} | {100: "ab"}
    tokens = [
        names.get(index) or (letters[index - 3] if 3 <= index < 3 + len(letters) else f"t{index}")
        for index in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special.values() else 1 for index in range(size)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)


def write_tower(
    name: str,
    model: PreTrainedModel,
    path: Path,
    *,
    swaps: bool = False,
    left_out: str | None = None,
    added: str | None = None,
    **changes: Any,
) -> None:
    """`swaps`: what widens an MLP and what narrows it, as older converters did."""
    vision = model.config.vision_config
    values: dict[str, Any] = {
        "projector_type": PROJECTORS[name],
        "has_vision_encoder": True,
        "vision.patch_size": vision.patch_size,
        "vision.embedding_length": vision.hidden_size,
        "vision.feed_forward_length": vision.intermediate_size,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": model.config.get_text_config().hidden_size,
        "vision.image_mean": MEAN,
        "vision.image_std": DEVIATION,
    }
    if name == "gemma3":
        values |= {"vision.block_count": vision.num_hidden_layers, "vision.image_size": vision.image_size}
        values |= {"vision.attention.head_count": vision.num_attention_heads, "vision.projector.scale_factor": 1}
    else:
        values |= {"vision.block_count": vision.depth, "vision.attention.head_count": vision.num_heads}
        values |= {"vision.spatial_merge_size": vision.spatial_merge_size, "vision.image_size": 32}
    if name == "qwen2.5-vl":
        values |= {"vision.n_wa_pattern": 2, "vision.window_size": vision.window_size}
    if name.startswith("qwen3"):
        deep = vision.deepstack_visual_indexes
        values["vision.is_deepstack_layers"] = [layer in deep for layer in range(vision.depth)]
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in (values | changes).items():
        if value is not None:
            gguf_models._add(writer, f"clip.{key}", value)
    tensors = tower_tensors(name, model) | ({added: torch.ones(4)} if added else {})
    for key, one in tensors.items():
        if key != left_out:
            turned = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swaps else {}
            part = key.split(".")[3] if key.startswith("v.blk.") else ""
            writer.add_tensor(key.replace(part or key, turned.get(part, part or key)), one.float().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tower_tensors(name: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gives the tensors under the names that the gguf package has for those of checkpoints."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    found: dict[str, torch.Tensor] = {}
    for key, one in model.state_dict().items():
        if is_text(key):
            continue
        stored = key.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        stored = stored.replace("_projection_weight", "_projection.weight")
        if stored.endswith("patch_embed.proj.weight"):
            found["v.patch_embd.weight"], found["v.patch_embd.weight.1"] = one.unbind(2)
        elif "deepstack_merger_list" in stored:
            _, _, index, part = stored.split(".", 3)
            layer = model.config.vision_config.deepstack_visual_indexes[int(index)]
            found[f"v.deepstack.{layer}.{part.replace('linear_', '')}"] = one
        elif name.startswith("qwen3") and "merger.linear_fc" in stored:
            found[f"mm.{ {'1': 0, '2': 2}[stored.split('linear_fc')[1][0]] }.{stored.rpartition('.')[2]}"] = one
        elif name.startswith("qwen3") and "merger.norm" in stored:
            found[f"v.post_ln.{stored.rpartition('.')[2]}"] = one
        elif name == "qwen2.5-vl" and ".qkv." in stored:
            for letter, part in zip("qkv", one.chunk(3), strict=True):
                found[f"v.blk.{stored.split('.')[2]}.attn_{letter}.{stored.rpartition('.')[2]}"] = part
        else:
            theirs = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, stored
            found[theirs] = one + 1 if "soft_emb_norm" in stored else one
    return found
