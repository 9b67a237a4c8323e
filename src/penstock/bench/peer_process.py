"""One reader of prompts in a process of its own: Penstock, transformers or llama.cpp, asked by lines of JSON.

Run by its path, with the interpreter that the reader is installed in, so it imports nothing but Python at its top.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

KIB = 1024
LLAMA_CPP_BATCH = 2048  # tokens of one call
LLAMA_CPP_UBATCH = 512  # tokens computed at once; its default, and the fastest on two cores


class PeerAdapter(ABC):
    """Each of its public methods may be asked for by name."""

    library: ClassVar[str]

    @abstractmethod
    def __init__(self, settings: dict[str, Any]) -> None: ...

    @abstractmethod
    def written(self, prompt: Sequence[int], num_tokens: int) -> Iterable[tuple[int, float]]:
        """Each token and when it was there."""

    def read(self, prompt: list[int], num_tokens: int, **options: Any) -> dict[str, Any]:
        _forget_peak()
        started = time.perf_counter()
        written = list(self.written(prompt, num_tokens, **options))
        return {
            "read_s": written[0][1] - started,
            "write_s": written[-1][1] - written[0][1],
            "peak_bytes": _peak_bytes(),
            "token_ids": [token for token, _ in written],
        }


class Penstock(PeerAdapter):
    library = "penstock.engine.engine"  # before torch, whose threads it tells how to wait

    def __init__(self, settings: dict[str, Any]) -> None:
        from penstock.engine.engine import Engine

        names = ("dtype", "quantize", "threads", "context", "chunk_size", "device", "lane")
        given = {name: settings[name] for name in names if settings[name] is not None}
        self._engine = Engine.load(settings["model"], prefix_cache=False, **given)

    def written(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Iterator[tuple[int, float]]:
        from penstock.request import Token

        for event in self._engine.stream(list(prompt), max_tokens=num_tokens, ignore_eos=True, **options):
            if isinstance(event, Token):
                yield event.token_id, time.perf_counter()

    def write_together(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for `num_tokens` of each stream, after all prompts were read."""
        return self._subject().write_together(prompts, num_tokens)[1]

    def losses(self, text: str, num_tokens: int) -> list[float]:
        """Tells the loss of each token of a text. Chunks are so small that codes stay codes."""
        tokens = self._engine.tokenizer.encode(text, add_special_tokens=True)[:num_tokens]
        return self._subject().losses(tokens, chunk_size=32)

    def _subject(self) -> Any:
        from penstock.bench.workbench import EngineSubject

        return EngineSubject(self._engine)


class Transformers(PeerAdapter):
    """`generate` as users call it: SDPA, its own cache, and its own way to chunk where a chunk size is given."""

    library = "transformers.modeling_utils"

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(settings["threads"])
        dtype = getattr(torch, settings["dtype"])
        model: Any = AutoModelForCausalLM.from_pretrained(settings["files"], dtype=dtype, local_files_only=True)
        device = settings["device"]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(device).eval()
        self._model.generation_config.eos_token_id = None
        self._chunking = {"prefill_chunk_size": settings["chunk_size"]} if settings["chunk_size"] else {}

    def written(self, prompt: Sequence[int], num_tokens: int) -> list[tuple[int, float]]:
        import torch

        clock = _Clock()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                streamer=clock,
                **self._chunking,
            )
        return clock.tokens


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


class LlamaCpp(PeerAdapter):
    """Its C interface, greedy, with flash attention and a 16-bit cache: no sampler and no copy of logits in between."""

    library = "llama_cpp"

    def __init__(self, settings: dict[str, Any]) -> None:
        library: Any = import_module(self.library)
        self._library, self._quiet = library, _silenced(library)
        model = library.llama_model_load_from_file(settings["files"].encode(), library.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp cannot read {settings['files']}.")
        params = library.llama_context_default_params()
        params.n_ctx = settings["context"]
        params.n_batch, params.n_ubatch = LLAMA_CPP_BATCH, settings["chunk_size"] or LLAMA_CPP_UBATCH
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context of {settings['context']} tokens.")
        self._num_vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def written(self, prompt: Sequence[int], num_tokens: int) -> Iterator[tuple[int, float]]:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        tokens = prompt
        for _ in range(num_tokens):
            tokens = [self._next_token(tokens)]
            yield tokens[0], time.perf_counter()

    def _next_token(self, tokens: Sequence[int]) -> int:
        import numpy as np

        for start in range(0, len(tokens), LLAMA_CPP_BATCH):
            part = tokens[start : start + LLAMA_CPP_BATCH]
            array = (self._library.llama_token * len(part))(*part)  # the batch points into it
            if code := self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(part))):
                raise SystemExit(f"llama_decode gave {code} for {len(part)} tokens at {start}.")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._num_vocabulary,)).argmax())


def convert_for_transformers(source: str, dtype: str, target: str) -> None:
    """A GGUF file as a folder of safetensors: what the library loads fastest, and without a package of its own."""
    import torch

    from penstock.foreign.pretrained import causal_class, load_causal
    from penstock.models.files import resolve

    files = resolve(source)
    load_causal(files, *causal_class(files), getattr(torch, dtype), torch.device("cpu")).save_pretrained(target)


def convert_for_llama_cpp(source: str, weights: str, target: str) -> None:
    """A GGUF file in another format, so that every reader can compute with weights of equal size."""
    library: Any = import_module("llama_cpp")
    quiet = _silenced(library)
    formats = {"bfloat16": library.LLAMA_FTYPE_MOSTLY_BF16, "q8_0": library.LLAMA_FTYPE_MOSTLY_Q8_0}
    params = library.llama_model_quantize_default_params()
    params.ftype = formats[weights]
    params.allow_requantize = True
    if code := library.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"llama.cpp cannot convert {source} to {weights}: {code}.")
    del quiet


def _silenced(library: Any) -> Any:
    """What the library keeps a bare pointer to."""
    quiet = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(quiet, ctypes.c_void_p(0))
    return quiet


ADAPTERS: dict[str, type[PeerAdapter]] = {"penstock": Penstock, "transformers": Transformers, "llama.cpp": LlamaCpp}
CONVERTERS = {"transformers": convert_for_transformers, "llama.cpp": convert_for_llama_cpp}


def main() -> None:
    """Reads its settings and then one ask per line; answers each with one line."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    settings = json.loads(sys.stdin.readline())
    adapter = ADAPTERS[settings["reader"]]
    import_module(adapter.library)
    version = sys.modules[adapter.library.partition(".")[0]].__version__
    library_bytes = _status_bytes("VmRSS")
    started = time.perf_counter()
    reader = adapter(settings)
    loaded = {"version": version, "load_s": time.perf_counter() - started, "library_bytes": library_bytes}
    _return_freed_memory()
    loaded["loaded_bytes"] = _status_bytes("VmRSS")
    loaded["load_peak_bytes"] = _status_bytes("VmHWM")
    print(json.dumps(loaded), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(getattr(reader, ask["do"])(**ask["arguments"])), file=answers, flush=True)


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
    """Tells the peak memory of the process, or of the GPU where it uses one."""
    return sys.modules["torch"].cuda.max_memory_allocated() if _uses_gpu() else _status_bytes("VmHWM")


def _uses_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise SystemExit(f"/proc/self/status has no {name}; memory is measured on Linux.")


if __name__ == "__main__":
    try:
        if sys.argv[1:]:
            CONVERTERS[sys.argv[1]](*sys.argv[2:])
        else:
            main()
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error.name} is not installed for {sys.executable}. Install penstock[peers], or name an interpreter that "
            "has llama_cpp with --llama-python."
        ) from None
