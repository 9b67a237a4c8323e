"""One reader of prompts in a process of its own: Penstock, transformers or llama.cpp, asked by lines of JSON.

Run by its path, with the interpreter that the reader is installed in, so it imports nothing but Python at its top.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

KIB = 1024
LLAMA_CPP_BATCH = 2048  # tokens of one call
LLAMA_CPP_UBATCH = 512  # tokens computed at once; its default, and the fastest on two cores

# A prompt and how many tokens to write -> each token and when it was there.
Write = Callable[[Sequence[int], int], Iterable[tuple[int, float]]]


def penstock(settings: dict[str, Any]) -> Write:
    from penstock.engine.engine import Engine
    from penstock.request import Token

    names = ("dtype", "threads", "context", "chunk_size", "device", "lane")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    engine = Engine.load(settings["model"], prefix_cache=False, **given)

    def write(prompt: Sequence[int], num_tokens: int) -> Iterator[tuple[int, float]]:
        for event in engine.stream(list(prompt), max_tokens=num_tokens, ignore_eos=True):
            if isinstance(event, Token):
                yield event.token_id, time.perf_counter()

    return write


def transformers(settings: dict[str, Any]) -> Write:
    """`generate` as users call it: SDPA, its own cache, and its own way to chunk where a chunk size is given."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["files"], dtype=dtype, local_files_only=True)
    model = model.to(settings.get("device") or "cpu").eval()
    model.generation_config.eos_token_id = None
    chunking = {"prefill_chunk_size": settings["chunk_size"]} if settings.get("chunk_size") else {}

    def write(prompt: Sequence[int], num_tokens: int) -> list[tuple[int, float]]:
        clock = _Clock()
        ids = torch.tensor([list(prompt)], device=model.device)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                streamer=clock,
                **chunking,
            )
        return clock.tokens

    return write


class _Clock:
    """A streamer of `generate`: the first thing that it is given is the prompt."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, float]] = []
        self.has_seen_prompt = False

    def put(self, value: Any) -> None:
        if self.has_seen_prompt:
            self.tokens.append((int(value[-1]), time.perf_counter()))
        self.has_seen_prompt = True

    def end(self) -> None:
        pass


def llama_cpp(settings: dict[str, Any]) -> Write:
    """Its C interface, greedy, with flash attention and a 16-bit cache: no sampler and no copy of logits in between."""
    library: Any = import_module("llama_cpp")
    import numpy as np

    quiet = _silence_llama_cpp(library)
    model = library.llama_model_load_from_file(settings["files"].encode(), library.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot read {settings['files']}.")
    params = library.llama_context_default_params()
    params.n_ctx = settings["context"]
    params.n_batch, params.n_ubatch = LLAMA_CPP_BATCH, settings.get("chunk_size") or LLAMA_CPP_UBATCH
    params.n_threads = params.n_threads_batch = settings["threads"]
    params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = library.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot make a context of {settings['context']} tokens.")
    num_vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def read(tokens: Sequence[int]) -> int:
        for start in range(0, len(tokens), LLAMA_CPP_BATCH):
            part = tokens[start : start + LLAMA_CPP_BATCH]
            array = (library.llama_token * len(part))(*part)
            if code := library.llama_decode(context, library.llama_batch_get_one(array, len(part))):
                raise SystemExit(f"llama_decode gave {code}; the context holds {settings['context']} tokens.")
        logits = library.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(num_vocabulary,)).argmax())

    def write(prompt: Sequence[int], num_tokens: int) -> Iterator[tuple[int, float]]:
        assert quiet is not None  # the library keeps a bare pointer to it
        library.llama_memory_clear(library.llama_get_memory(context), True)
        tokens = prompt
        for _ in range(num_tokens):
            tokens = [read(tokens)]
            yield tokens[0], time.perf_counter()

    return write


def convert_for_transformers(source: str, dtype: str, target: str) -> None:
    """A GGUF file as a folder of safetensors: what the library loads fastest, and without a package of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from penstock.models.files import resolve
    from penstock.models.weights import open_weights

    files = resolve(source)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**files.config), dtype=getattr(torch, dtype))
    weights = open_weights(files)
    for name, parameter in model.named_parameters():
        weights.copy_into(parameter.data, name)
    model.save_pretrained(f"{target}.unfinished")
    Path(f"{target}.unfinished").rename(target)


def convert_for_llama_cpp(source: str, target: str) -> None:
    """A GGUF file in bfloat16, so that every reader computes with equal weights of equal size."""
    library: Any = import_module("llama_cpp")

    quiet = _silence_llama_cpp(library)
    params = library.llama_model_quantize_default_params()
    params.ftype = library.LLAMA_FTYPE_MOSTLY_BF16
    params.allow_requantize = True
    if code := library.llama_model_quantize(source.encode(), f"{target}.unfinished".encode(), params):
        raise SystemExit(f"llama.cpp cannot convert {source} to bfloat16: {code}.")
    Path(f"{target}.unfinished").rename(target)
    del quiet


def _silence_llama_cpp(library: Any) -> Any:
    quiet = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(quiet, ctypes.c_void_p(0))
    return quiet


READERS = {"penstock": penstock, "transformers": transformers, "llama.cpp": llama_cpp}
CONVERTERS = {"transformers": convert_for_transformers, "llama.cpp": convert_for_llama_cpp}


def main() -> None:
    """Reads its settings and then one request per line; answers each with one line."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    settings = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    write = READERS[settings["reader"]](settings)
    load_s = time.perf_counter() - started
    load_peak_bytes = _status_bytes("VmHWM")
    _return_freed_memory()
    loaded = {"load_s": load_s, "load_peak_bytes": load_peak_bytes, "loaded_bytes": _status_bytes("VmRSS")}
    print(json.dumps(loaded), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_measured(write, request["prompt"], request["num_tokens"])), file=answers, flush=True)


def _measured(write: Write, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    _forget_peak()
    started = time.perf_counter()
    written = list(write(prompt, num_tokens))
    return {
        "read_s": written[0][1] - started,
        "write_s": written[-1][1] - written[0][1],
        "peak_bytes": _peak_bytes(),
        "token_ids": [token for token, _ in written],
    }


def _return_freed_memory() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if _uses_gpu():
        sys.modules["torch"].cuda.reset_peak_memory_stats()


def _peak_bytes() -> int:
    """Of the process, or of the GPU where it uses one."""
    return sys.modules["torch"].cuda.max_memory_allocated() if _uses_gpu() else _status_bytes("VmHWM")


def _uses_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise SystemExit(f"/proc/self/status has no {name}; memory is measured on Linux.")


if __name__ == "__main__":
    if sys.argv[1:]:
        CONVERTERS[sys.argv[1]](*sys.argv[2:])
    else:
        main()
