"""Transformers models from local files: safetensors by the library, GGUF by our own reader. Never remote code."""

from __future__ import annotations

import copy
import ctypes
import logging
import mmap
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from penstock.errors import InvalidModelFile, UnsupportedModel, first_line
from penstock.models.files import ModelFiles
from penstock.models.gguf_tower import GgufTower
from penstock.models.media_spec import in_eight_bits
from penstock.models.merging import merge_into
from penstock.models.stored_names import HEAD, decoder_prefix
from penstock.models.weights import SLICE_BYTES, GgufWeights, open_weights


def causal_class(files: ModelFiles) -> tuple[type, Any]:
    """Finds (the class that runs the model, its config), both of the library; what it does not know is refused."""
    return _class_of(files, "MODEL_FOR_CAUSAL_LM_MAPPING", "has no causal language model in it")


def is_causal(model_type: str) -> bool:
    """Tells whether the library has a causal language model of that type."""
    from transformers.models.auto import modeling_auto

    return model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def image_text_class(files: ModelFiles) -> tuple[type, Any]:
    """Finds the class and the config of a model that reads text and images."""
    return _class_of(files, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "has no image-text model in it")


def seq2seq_class(files: ModelFiles) -> tuple[type, Any]:
    """Finds the class and the config of an encoder-decoder model."""
    model_class, config = _class_of(files, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "has no text-to-text model in it")
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
        raise UnsupportedModel(f"{files.folder} gives no processor: {first_line(error, 200)}.") from error


def _class_of(files: ModelFiles, mapping: str, why_unknown: str) -> tuple[type, Any]:
    """`mapping`: the library's own from configs to classes, by name."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    model_type = str(files.config.get("model_type"))
    try:
        with quiet_library():
            if files.folder is not None and not files.why_text_only:
                config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True)
            else:
                config = AutoConfig.for_model(**files.config)
        known: Any = getattr(modeling_auto, mapping).get(type(config), None) or _named_class(files.config, config)
    except KeyError:
        raise _unknown(model_type, why_unknown) from None
    except (ValueError, TypeError, OSError, AttributeError, ImportError) as error:
        raise _unknown(model_type, first_line(error, 200)) from error
    classes = known if isinstance(known, tuple) else (known,)
    names = files.config.get("architectures") or []
    return next((one for one in classes if one.__name__ in names), classes[0]), config


def _named_class(said: Mapping[str, Any], config: Any) -> Any:
    """Finds a class of causal models that the config names and that the library does not list as one."""
    import transformers

    names = [name for name in said.get("architectures") or [] if name.endswith("ForCausalLM")]
    found = getattr(transformers, names[0], None) if names else None
    if found is None or found.config_class is not type(config):
        raise KeyError(said["model_type"])
    return found


def load_tower(files: ModelFiles, model_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """An image-text model without its language part, whose weights are not read: what is left encodes images."""
    config = copy.deepcopy(config)
    if in_eight_bits(files.config.get("quantization_config")):
        del config.quantization_config  # the tower is not: the loader has looked
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "hidden_size_per_layer_input", 0):
        text.hidden_size_per_layer_input = 0  # the width of a table
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    files = replace(files, adapter=None)  # it is merged where the language part is read, which knows what is left over
    if files.tower is None:
        model = load_causal(files, model_class, config, dtype, device)
    else:
        model = _tower_from_gguf(files.tower, model_class, config, dtype).to(device)
    for module in model.modules():
        for name in ("embed_tokens", "lm_head"):
            if isinstance(getattr(module, name, None), torch.nn.Module):
                setattr(module, name, None)
    return model


def load_causal(files: ModelFiles, model_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Loads a model in evaluation mode onto a device, into memory of its own."""
    with quiet_library():
        if files.gguf is not None:
            return _adapted(_from_gguf(files, model_class, config, dtype), files).to(device)
        try:
            model, report = model_class.from_pretrained(
                files.folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                key_mapping=_names_of_text_part(files, model_class),
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise InvalidModelFile(
                f"{files.folder} cannot be loaded by transformers: {first_line(error, 200)}."
            ) from error
    if missing := sorted(report["missing_keys"]):
        raise InvalidModelFile(
            f"{files.folder} has no tensor {missing[0]!r}; the file is incomplete or of another architecture."
        )
    if device.type == "cpu":
        _copy_out_of_files(model, files.weight_files)
    return _adapted(model, files).eval().to(device)


def _adapted(model: Any, files: ModelFiles) -> Any:
    if files.adapter is not None:
        merge_into(model, files.adapter)
    return model


def _names_of_text_part(files: ModelFiles, model_class: Any) -> dict[str, str] | None:
    """Maps the stored names of a text part to those of a text model; None where all of a model is read."""
    if not files.why_text_only:
        return None
    prefix = decoder_prefix(open_weights(files).names, files.folder)
    return {f"^{re.escape(prefix)}": f"{model_class.base_model_prefix}.", rf"^.*\b{re.escape(HEAD)}": HEAD}


def _copy_out_of_files(model: torch.nn.Module, paths: Collection[Path]) -> None:
    """Replaces weights that the library left mapped in their files: those pages come and go with what else the
    machine does, so no plan would hold for them, and a file that is cut short would end the process."""
    mapped = _mapped_ranges(paths)
    for tensor in (*model.parameters(), *model.buffers()):
        if any(tensor.data_ptr() in addresses for addresses in mapped):
            owned = torch.empty_like(tensor.data, memory_format=torch.contiguous_format)
            slices = (whole.flatten().split(SLICE_BYTES // tensor.itemsize) for whole in (owned, tensor.data))
            for ours, stored in zip(*slices, strict=True):
                ours.copy_(stored)
                _drop_pages(stored)
            tensor.data = owned


def _mapped_ranges(paths: Collection[Path]) -> list[range]:
    """Addresses at which this process has the files; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    names = {str(path.resolve()) for path in paths}
    fields = [line.split(maxsplit=5) for line in lines]
    places = [parts[0].split("-") for parts in fields if len(parts) == 6 and parts[5] in names]
    return [range(int(start, 16), int(end, 16)) for start, end in places]


def _drop_pages(tensor: torch.Tensor) -> None:
    """Gives the whole pages of a mapped slice back before the next one is copied."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - first
    if num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def _from_gguf(files: ModelFiles, model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    from transformers.initialization import no_init_weights

    source = open_weights(files)
    with no_init_weights():
        model = model_class._from_config(config, dtype=dtype)
    model.tie_weights()
    if apart := sorted({name for name, _ in model.named_parameters()} - source.names):
        raise UnsupportedModel(
            f"{files.name} keeps {apart[0]!r} under another name, which only Penstock's own decoder knows; leave "
            "--lane away."
        )
    for name, parameter in model.named_parameters():
        source.copy_into(parameter, name)
    return model.eval()


def _tower_from_gguf(tower: GgufTower, model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Weights of two frames are stored apart."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = model_class._from_config(config, dtype=dtype)
    places = {}
    for name, one in model.named_parameters():
        if not name.startswith(("model.language_model.", "lm_head.")):
            frames = one.unbind(2) if one.dim() == 5 else ()
            places |= {f"{name}.{frame}": part for frame, part in enumerate(frames)} or {name: one}
    source = GgufWeights(tower.gguf, tower.tensors(places))
    for name, place in places.items():
        source.copy_into(place, name)
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
