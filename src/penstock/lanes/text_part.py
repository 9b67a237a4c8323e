"""The text part of an image-text model as a model of its own: when it is all that is read, and its config. No torch
but where a config or a processor has to be asked of the library."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import UnsupportedModel
from penstock.lanes.native_text_kind import NATIVE_TEXT
from penstock.models.families import FAMILIES
from penstock.models.files import ModelFiles
from penstock.models.media_spec import NATIVE_MEDIA, media_text_config

ASKED_FOR = "asked for by --text-only"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # one of them says how images become tensors
# What a config says beside its parts.
OF_ALL_PARTS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "auto_map")


def part_to_read(files: ModelFiles, config: EngineConfig, *, is_for_images: bool) -> ModelFiles:
    """Takes the text part of an image-text model where it is asked for, or where nothing can encode images.

    `is_for_images`: the lane that was asked for reads images.
    """
    if "vision_config" not in files.config or files.config.get("is_encoder_decoder") or files.folder is None:
        return files
    if config.text_only:
        why = ASKED_FOR
    elif config.text_only is None and not is_for_images:
        why = why_no_images(files)
    else:
        why = ""
    text = _text_config(files, must_be_native=why != ASKED_FOR) if why else None
    if text is None:
        return files
    if why != ASKED_FOR:
        config.refuse_if_strict(f"only the text part of this model could be read: {why}", "Or give --text-only.")
    return dataclasses.replace(files, config=text, identity=f"{files.identity}:text", why_text_only=why)


def why_no_images(files: ModelFiles) -> str:
    """Says what is missing to encode images; empty where nothing is, or where the files are not here yet."""
    assert files.folder is not None
    if find_spec("PIL") is None:
        return "reading images needs Pillow, which is not installed; pip install pillow"
    if not any(files.folder.glob("*.safetensors")):
        return ""
    if not any((files.folder / name).is_file() for name in PROCESSORS):
        return f"{files.folder} gives no processor: it has no {PROCESSORS[0]}"
    if find_spec("torchvision") is not None:
        return ""
    from penstock.foreign.pretrained import load_processor

    try:
        load_processor(files)
    except UnsupportedModel as error:
        return str(error).removesuffix(".")
    return ""


def _text_config(files: ModelFiles, *, must_be_native: bool) -> dict[str, Any] | None:
    """The text part's config with what holds for all parts; None where nothing runs that part by itself."""
    kind = (files.config.get("text_config") or {}).get("model_type")
    may_be_native = kind in FAMILIES if kind else files.config.get("model_type") in NATIVE_MEDIA
    if must_be_native and not may_be_native:
        return None
    text = media_text_config(files)
    if not NATIVE_TEXT.claim(text).eligible:
        from penstock.foreign.pretrained import is_causal

        if must_be_native or text.get("use_bidirectional_attention") or not is_causal(str(text.get("model_type"))):
            return None
    of_all = {name: files.config[name] for name in OF_ALL_PARTS if text.get(name) is None and name in files.config}
    return {**text, **of_all}
