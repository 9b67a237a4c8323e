"""llama.cpp as a process that reads and writes on demand, for a Python that has llama-cpp-python and nothing else."""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from pathlib import Path

FILE_TYPES = {"f16": 1, "q8_0": 7, "bf16": 32}  # llama.cpp's numbers


def tokens_of(count: int, seed: int, vocabulary: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(10, vocabulary) for _ in range(count)]


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def answer_asks(peer: object) -> None:
    """Asks come as lines of JSON: the name of a method and its arguments."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps({"found": getattr(peer, ask["do"])(**ask["with"])}), flush=True)


class LlamaCpp:
    def __init__(self, *, gguf: str, folder: str, weights: str, threads: int, context: int) -> None:
        import llama_cpp  # ty: ignore[import-not-found]

        self.base_bytes = peak_bytes()
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        path = Path(gguf)
        if weights in FILE_TYPES:
            path = Path(folder) / f"{weights}.gguf"
            if not path.exists():
                settings = llama_cpp.llama_model_quantize_default_params()
                settings.ftype, settings.allow_requantize, settings.nthread = FILE_TYPES[weights], True, threads
                assert llama_cpp.llama_model_quantize(gguf.encode(), str(path).encode(), settings) == 0
        self._model = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=2048,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )

    def read(self, num_tokens: int, seed: int) -> float:
        self._model.reset()
        tokens = tokens_of(num_tokens, seed, self._model.n_vocab())
        began = time.perf_counter()
        self._model.eval(tokens)
        return time.perf_counter() - began

    def write(self, context: int, num_tokens: int, seed: int) -> float:
        """The next tokens are given: choosing them is not measured."""
        self.read(context, seed)
        tokens = tokens_of(num_tokens, seed + 1, self._model.n_vocab())
        began = time.perf_counter()
        for token in tokens:
            self._model.eval([token])
        return time.perf_counter() - began

    def memory(self) -> list[int]:
        return [self.base_bytes, peak_bytes()]


if __name__ == "__main__":
    answer_asks(LlamaCpp(**json.loads(sys.argv[1])))
