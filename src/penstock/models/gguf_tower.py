"""The vision tower of a GGUF model, in a file of its own (mmproj): its config, and where its tensors are. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from math import isqrt, prod
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModelFile, InvalidSetting, ModelNotFound, PenstockError, UnsupportedModel, brief
from penstock.models.files import ModelFiles, identity_of
from penstock.models.gguf import GgufFile, GgufTensor, read_gguf
from penstock.models.gguf_keys import Keys
from penstock.models.gguf_translation import HfTensor, Piece

# The library's names, then the file's, both after `model.`; `{}` is the layer. A stem keeps its `.weight` or `.bias`.
_BLOCK = "vision_tower.encoder.layers.{}"
_SIGLIP = {
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    **{f"{_BLOCK}.layer_norm{n}": f"v.blk.{{}}.ln{n}" for n in (1, 2)},
    **{f"{_BLOCK}.self_attn.{x}_proj": f"v.blk.{{}}.attn_{x}" for x in ("q", "k", "v", "out")},
    f"{_BLOCK}.mlp.fc1": "v.blk.{}.ffn_up",
    f"{_BLOCK}.mlp.fc2": "v.blk.{}.ffn_down",
    "vision_tower.post_layernorm": "v.post_ln",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}
_QWEN = {
    "visual.patch_embed.proj.weight.0": "v.patch_embd.weight",  # of the first of two frames
    "visual.patch_embed.proj.weight.1": "v.patch_embd.weight.1",
    "visual.patch_embed.proj": "v.patch_embd",
    **{f"visual.blocks.{{}}.norm{n}": f"v.blk.{{}}.ln{n}" for n in (1, 2)},
    "visual.blocks.{}.attn.proj": "v.blk.{}.attn_out",
}
_QWEN25 = {
    **_QWEN,
    "visual.blocks.{}.attn.qkv": "v.blk.{}.attn_q v.blk.{}.attn_k v.blk.{}.attn_v",
    **{f"visual.blocks.{{}}.mlp.{x}_proj": f"v.blk.{{}}.ffn_{x}" for x in ("gate", "up", "down")},
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.{}": "mm.{}",
}
_QWEN3 = {
    **_QWEN,
    "visual.pos_embed": "v.position_embd",
    "visual.blocks.{}.attn.qkv": "v.blk.{}.attn_qkv",
    "visual.blocks.{}.mlp.linear_fc1": "v.blk.{}.ffn_up",
    "visual.blocks.{}.mlp.linear_fc2": "v.blk.{}.ffn_down",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "visual.deepstack_merger_list.{}.norm": "v.deepstack.{}.norm",
    **{f"visual.deepstack_merger_list.{{}}.linear_fc{n}": f"v.deepstack.{{}}.fc{n}" for n in (1, 2)},
}
_QWEN_TOKENS = {
    f"{word}_token_id": f"<|{word.replace('image', 'image_pad').replace('video', 'video_pad')}|>"
    for word in ("image", "video", "vision_start", "vision_end")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerKind:
    """Says what a projector's tower is called in the library, and in the file."""

    models: Mapping[str, tuple[str, str]]  # the text part's model type, and the whole model's with its class
    names: Mapping[str, str]
    tokens: Mapping[str, str]  # in the vocabulary, by the config's words for their ids
    output: tuple[str, int]  # a tensor, and which of its sizes is the hidden size of the text part
    config: Callable[[Keys], dict[str, Any]]  # of all but the text part


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTower:
    gguf: GgufFile
    kind: TowerKind
    pixels: Mapping[str, list[float]]  # their mean and deviation, where the file says them

    def tensors(self, names: Iterable[str]) -> dict[str, HfTensor]:
        """Finds the tensors of the library's names; one that would be left out refuses the file."""
        left, found = dict(self.gguf.tensors), {}
        for name in names:
            stored = [left.pop(one, None) for one in self._stored(name)]
            if None in stored:
                raise InvalidModelFile(f"{self.gguf.path} has no tensor for {name!r}; download or convert it again.")
            found[name] = _joined([one for one in stored if one is not None])
        if left:
            raise UnsupportedModel(
                f"{self.gguf.path} holds tensor {min(left)!r}, which the model's tower does not have; use the model's "
                "safetensors folder to read images."
            )
        return found

    def _stored(self, name: str) -> list[str]:
        plain = name.removeprefix("model.").replace(".vision_model.", ".")  # as other releases of the library have it
        number = re.search(r"\.(\d+)\.", plain)
        form = plain if number is None else plain.replace(number[0], ".{}.", 1)
        stem, _, suffix = form.rpartition(".")
        exact = self.kind.names.get(form)
        theirs = [exact] if exact else [f"{one}.{suffix}" for one in self.kind.names.get(stem, stem).split()]
        layer = "" if number is None else number[1]
        if ".deepstack_merger_list." in plain:
            layer = str(_deepstack(Keys(self.gguf, "clip"))[int(layer)])
        return [self._unswapped(one.replace("{}", layer)) for one in theirs]

    def _unswapped(self, name: str) -> str:
        """Older converters called what widens `ffn_down`, and what narrows `ffn_up`."""
        down = self.gguf.tensors.get(re.sub(r"\.ffn_(up|down)\..*", ".ffn_down.weight", name))
        width = self.gguf.metadata.get("clip.vision.embedding_length")
        if down is None or ".ffn_" not in name or "gate" in name or down.shape[0] == width or down.shape[-1] != width:
            return name
        return name.replace("ffn_up", "ffn_down") if "ffn_up" in name else name.replace("ffn_down", "ffn_up")


def _joined(stored: list[GgufTensor]) -> HfTensor:
    """One below the other, where there are several; Gemma's norm is stored with the one that its class adds."""
    ends = list(accumulate(one.shape[0] for one in stored))
    added = 1.0 if stored[0].name == "mm.soft_emb_norm.weight" else 0.0
    pieces = (
        Piece(stored=one, first_row=end - one.shape[0], subtract=added) for one, end in zip(stored, ends, strict=True)
    )
    return HfTensor(shape=(ends[-1], *stored[0].shape[1:]), pieces=tuple(pieces))


def _shape(keys: Keys, name: str) -> tuple[int, ...]:
    if (tensor := keys.gguf.tensors.get(name)) is None:
        raise InvalidModelFile(f"{keys.path} has no tensor {name!r}; download or convert it again.")
    return tensor.shape


def _vision(keys: Keys) -> tuple[dict[str, Any], int, int]:
    """Gives sizes as the tensors have them, and counts of layers and heads as the metadata says."""
    patch, layers = _shape(keys, "v.patch_embd.weight"), keys.integer("vision.block_count")
    heads, wide = keys.integer("vision.attention.head_count"), _shape(keys, "v.blk.0.ffn_up.weight")
    _shape(keys, f"v.blk.{layers - 1}.ln1.weight")
    if len(patch) != 4 or patch[0] % heads:
        raise keys.refuse("vision.attention.head_count", heads, f"heads for patches of shape {patch}")
    sizes = {"hidden_size": patch[0], "intermediate_size": prod(wide) // patch[0], "patch_size": patch[-1]}
    return sizes, layers, heads


def _gemma3(keys: Keys) -> dict[str, Any]:
    sizes, layers, heads = _vision(keys)
    side = isqrt(_shape(keys, "v.position_embd.weight")[0])
    across = side // keys.integer("vision.projector.scale_factor", 4)
    if not across:
        raise keys.refuse("vision.projector.scale_factor", side, f"at most {side}")
    vision = {
        **sizes,
        "model_type": "siglip_vision_model",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": side * sizes["patch_size"],
        "vision_use_head": False,
        "layer_norm_eps": keys.number("vision.attention.layer_norm_epsilon", 1e-6),
    }
    return {"vision_config": vision, "mm_tokens_per_image": across * across}


def _qwen(keys: Keys, **more: Any) -> dict[str, Any]:
    sizes, layers, heads = _vision(keys)
    out, merged = _shape(keys, "mm.2.weight")[0], isqrt(_shape(keys, "mm.0.weight")[-1] // sizes["hidden_size"])
    vision = {"depth": layers, "num_heads": heads, "spatial_merge_size": merged, "out_hidden_size": out, **more}
    return {"vision_config": sizes | vision}


def _qwen25(keys: Keys) -> dict[str, Any]:
    every = keys.integer("vision.n_wa_pattern", 8)
    full = list(range(every - 1, _vision(keys)[1], every))
    window = keys.integer("vision.window_size", 112)
    return _qwen(keys, model_type="qwen2_5_vl", fullatt_block_indexes=full, window_size=window)


def _qwen3(keys: Keys) -> dict[str, Any]:
    positions = _shape(keys, "v.position_embd.weight")[0]
    return _qwen(keys, num_position_embeddings=positions, deepstack_visual_indexes=_deepstack(keys))


def _deepstack(keys: Keys) -> list[int]:
    is_one = keys.raw("vision.is_deepstack_layers", [])
    if not isinstance(is_one, list):
        raise keys.refuse("vision.is_deepstack_layers", is_one, "true or false for each layer")
    return [layer for layer, adds in enumerate(is_one) if adds]


TOWERS: Mapping[str, TowerKind] = {
    "gemma3": TowerKind(
        models={"gemma3_text": ("gemma3", "Gemma3ForConditionalGeneration")},
        names=_SIGLIP,
        tokens={
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        output=("mm.input_projection.weight", 1),
        config=_gemma3,
    ),
    "qwen2.5vl_merger": TowerKind(
        models={"qwen2_5_vl_text": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")},
        names=_QWEN25,
        tokens=_QWEN_TOKENS,
        output=("mm.2.weight", 0),
        config=_qwen25,
    ),
    "qwen3vl_merger": TowerKind(
        models={
            "qwen3_vl_text": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
            "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        },
        names=_QWEN3,
        tokens=_QWEN_TOKENS,
        output=("mm.2.weight", 0),
        config=_qwen3,
    ),
}


def with_tower(files: ModelFiles, asked: str | None) -> ModelFiles:
    """The model with the tower that is asked for, or that lies beside it and fits."""
    gguf = files.gguf
    if asked is not None:
        if gguf is None:
            raise InvalidSetting("--mmproj is for a model in a GGUF file; other models have their tower in them.")
        if not Path(asked).expanduser().is_file():
            raise ModelNotFound(f"--mmproj {asked}: there is no such file.")
        return _with_file(files, Path(asked).expanduser())
    if gguf is None:
        return files
    is_part = any(files.config["model_type"] in kind.models for kind in TOWERS.values())
    reasons = []
    for path in sorted(path for path in gguf.path.parent.glob("*.gguf") if "mmproj" in path.name.lower()):
        if find_spec("PIL") is None:
            reasons.append("reading images needs Pillow, which is not installed; pip install pillow")
            break
        try:
            return _with_file(files, path)
        except PenstockError as error:
            reasons.append(str(error).removesuffix("."))
    if is_part and files.config["model_type"] != "gemma3_text":  # some of those read text alone
        reasons.append("no mmproj file lies beside the GGUF; name it by --mmproj")
    return replace(files, why_no_tower=f"images are not read: {reasons[0]}") if reasons else files


def _with_file(files: ModelFiles, path: Path) -> ModelFiles:
    assert files.gguf is not None
    gguf = read_gguf(path)
    if gguf.metadata.get("general.architecture") != "clip":
        raise InvalidModelFile(f"{path} holds no vision tower (mmproj); its architecture is another.")
    names = ("clip.projector_type", "clip.vision.projector_type")
    projector = next((gguf.metadata[name] for name in names if name in gguf.metadata), None)
    kind = TOWERS.get(projector) if isinstance(projector, str) else None
    if kind is None:
        raise UnsupportedModel(
            f"{path} has a projector of type {brief(projector)}; {', '.join(TOWERS)} are read from GGUF, so use the "
            "model's safetensors folder to read images."
        )
    text, keys = files.config, Keys(gguf, "clip")
    width = _shape(keys, kind.output[0])[kind.output[1]]
    if text["model_type"] not in kind.models or width != text["hidden_size"]:
        raise InvalidModelFile(
            f"{path} belongs to another model: its {projector} gives {width} values, and the text part is "
            f"{brief(text['model_type'])} with a hidden size of {text['hidden_size']}; take both files of one model."
        )
    model_type, class_name = kind.models[text["model_type"]]
    tokens = {word: _token_id(files, token) for word, token in kind.tokens.items()}
    config = {
        "model_type": model_type,
        "architectures": [class_name],
        "text_config": text,
        **kind.config(keys),
        **tokens,
        **{key: text[key] for key in ("tie_word_embeddings", "dtype") if key in text},
    }
    found = {word: keys.raw(f"vision.{word}") for word in ("image_mean", "image_std")}
    tower = GgufTower(gguf=gguf, kind=kind, pixels={word: one for word, one in found.items() if isinstance(one, list)})
    weight_files = (*files.weight_files, *gguf.parts)
    identity = identity_of(config, weight_files)
    return replace(files, config=config, tower=tower, weight_files=weight_files, identity=identity)


def _token_id(files: ModelFiles, token: str) -> int:
    """Gives the id of a token; what the vocabulary lacks is put behind it, as Gemma's own is."""
    assert files.gguf is not None
    tokens = files.gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise InvalidModelFile(f"{files.gguf.path} has no list of tokens; download or convert it again.")
    return tokens.index(token) if token in tokens else len(tokens)
