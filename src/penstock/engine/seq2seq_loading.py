"""Brings an encoder-decoder model of transformers into memory, for the lane that reads its source in tiles."""

from __future__ import annotations

from typing import Any

import torch

from penstock.config import FIRST_CALL_BYTES_ESTIMATE, EngineConfig
from penstock.engine.loading import LoadedModel, gpu_memory, load_tokenizer
from penstock.engine.planning import TILINGS, choose_dtype, context_limit, require_room
from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.lanes.lane import DTYPE_BYTES, LaneFacts
from penstock.lanes.seq2seq import Seq2SeqLane
from penstock.lanes.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.models.files import ModelFiles
from penstock.plan.machine import default_memory_budget, resident_bytes
from penstock.plan.memory import MemoryModel
from penstock.prompt.render import ChatTemplate
from penstock.prompt.tokens import Tokenizer


def load_seq2seq(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    if files.folder is None:
        raise UnsupportedModel("Encoder-decoder models are read from safetensors, not from GGUF. Pass the folder.")
    model_class = _model_class(files)
    spec = seq2seq_spec(files.config)
    dtype = choose_dtype(config.dtype, files.config, device.type)
    parts = load_tokenizer(files)
    gpu = gpu_memory(device)
    memory = MemoryModel(
        shape=seq2seq_shape(spec, DTYPE_BYTES[dtype]),
        tiling=TILINGS[device.type],
        runtime_bytes=gpu.runtime_bytes if gpu else resident_bytes() + FIRST_CALL_BYTES_ESTIMATE,
        block_size=config.block_size,
    )
    budget = config.memory or (gpu.default_budget if gpu else default_memory_budget())
    max_source, warnings = context_limit(config, spec.max_source)
    num_tokens = min(require_room(memory, config, budget, device.type), 2 * max_source * config.max_running)
    model = _weights(model_class, files, getattr(torch, dtype), has_softcap=spec.attention_softcap is not None)
    model = model.to(device)
    lane = Seq2SeqLane(model, facts=facts, shape=memory.shape, max_source=max_source)
    if config.overlap:
        warnings.append(f"overlap {config.overlap} has no meaning for a source; it is 0")
    return LoadedModel(
        name=files.name,
        identity=f"{files.identity}:{dtype}",
        spec=spec,
        lane=lane,
        tokenizer=Tokenizer(parts.backend),
        chat_template=None
        if parts.chat_template is None
        else ChatTemplate(parts.chat_template, special_tokens=parts.special_tokens),
        eos_ids=parts.eos_ids | _end_tokens(model.generation_config),
        memory=memory,
        budget_bytes=budget,
        num_blocks=-(-num_tokens // config.block_size),
        max_context=2 * max_source,
        dtype=dtype,
        device=device,
        adjustments=(*warnings, *lane.rules.not_done),
        source=lane,
    )


def _model_class(files: ModelFiles) -> Any:
    """Imported before the memory is asked for, so that the library counts as part of the runtime."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    model_type = str(files.config.get("model_type"))
    is_known = model_type in CONFIG_MAPPING
    if not is_known or CONFIG_MAPPING[model_type] not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"The installed transformers has no text-to-text class for {model_type!r}, and code that comes with a "
            "model is not run. Take another model."
        )
    return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def _weights(model_class: Any, files: ModelFiles, dtype: torch.dtype, *, has_softcap: bool) -> Any:
    from transformers.utils import logging

    # Some releases hand softcaps to a kernel that leaves them out.
    kind = {"attn_implementation": "eager"} if has_softcap else {}
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # ours is the only one on the terminal
    try:
        model = model_class.from_pretrained(
            files.folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False, **kind
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidModelFile(f"{files.name} cannot be loaded ({reason}); download it again.") from error
    finally:
        if was_shown:
            logging.enable_progress_bar()
    return model.eval()


def _end_tokens(generation_config: Any) -> frozenset[int]:
    found = getattr(generation_config, "eos_token_id", None)
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
