"""Transformers models from local files: safetensors by the library, GGUF by our own reader. Never remote code."""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.models.files import ModelFiles
from penstock.models.weights import open_weights


def causal_class(files: ModelFiles) -> tuple[type, Any]:
    """(the class that runs the model, its config), both of the library; what it does not know is refused."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return _class_of(files, MODEL_FOR_CAUSAL_LM_MAPPING, "has no causal language model in it")


def image_text_class(files: ModelFiles) -> tuple[type, Any]:
    """The same for a model that reads text and images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return _class_of(files, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, "has no image-text model in it")


def seq2seq_class(files: ModelFiles) -> tuple[type, Any]:
    """The same for an encoder-decoder model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    model_class, config = _class_of(files, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "has no text-to-text model in it")
    if getattr(getattr(config, "encoder", config), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # some releases hand softcaps to a kernel that leaves them out
    return model_class, config


def load_processor(files: ModelFiles) -> Any:
    """What makes a model's inputs from text and images; it may need libraries that are not installed."""
    from transformers import AutoProcessor

    try:
        with quiet_library():
            return AutoProcessor.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        if "torchvision" in str(error).lower() and find_spec("torchvision") is None:
            raise UnsupportedModel(
                "its processor needs torchvision, which is not installed; pip install torchvision, in the version that "
                f"belongs to torch {torch.__version__}."
            ) from error
        raise UnsupportedModel(f"{files.folder} gives no processor: {_first_line(error)}") from error


def _class_of(files: ModelFiles, mapping: Any, why_unknown: str) -> tuple[type, Any]:
    from transformers import AutoConfig

    model_type = str(files.config.get("model_type"))
    try:
        with quiet_library():
            if files.folder is not None:
                config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True)
            else:
                config = AutoConfig.for_model(**files.config)
        known: Any = mapping[type(config)]
    except KeyError:
        raise _unknown(model_type, why_unknown) from None
    except (ValueError, TypeError, OSError, AttributeError, ImportError) as error:
        raise _unknown(model_type, _first_line(error)) from error
    classes = known if isinstance(known, tuple) else (known,)
    names = files.config.get("architectures") or []
    return next((one for one in classes if one.__name__ in names), classes[0]), config


def load_tower(files: ModelFiles, model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """An image-text model without its language part, whose weights are not read: what is left encodes images."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    model = load_causal(files, model_class, config, dtype)
    for module in model.modules():
        for name in ("embed_tokens", "lm_head"):
            if isinstance(getattr(module, name, None), torch.nn.Module):
                setattr(module, name, None)
    return model


def load_causal(files: ModelFiles, model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model in evaluation mode, in memory of its own."""
    with quiet_library():
        if files.gguf is not None:
            return _from_gguf(files, model_class, config, dtype)
        try:
            model, report = model_class.from_pretrained(
                files.folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise InvalidModelFile(f"{files.folder} cannot be loaded by transformers: {_first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise InvalidModelFile(
            f"{files.folder} has no tensor {missing[0]!r}; the file is incomplete or of another architecture."
        )
    return model.eval()


def _from_gguf(files: ModelFiles, model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    from transformers.initialization import no_init_weights

    source = open_weights(files)
    with no_init_weights():
        model = model_class._from_config(config, dtype=dtype)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        source.copy_into(parameter, name)
    return model.eval()


@contextmanager
def quiet_library() -> Generator[None]:
    """Progress bars and advice of the library, such as which kernels to install, stay out of our output."""
    from transformers.utils import logging as library

    verbosity, had_bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(logging.ERROR)
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if had_bars:
            library.enable_progress_bar()


def _unknown(model_type: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The installed transformers cannot run the architecture {model_type!r} ({why}); a newer transformers may."
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
