"""Penstock and transformers as processes that read and write on demand, and how any such process is asked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.bench.llama_peer import answer_asks, peak_bytes, tokens_of
from penstock.errors import PenstockError


class Peer:
    """A process beside this one; it waits until it is asked."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer("found")

    def _answer(self, key: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries may print lines of their own
                return json.loads(line)[key]
        raise PenstockError(f"{self.name} ended with {self._process.wait()}; its messages stand above.")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def own_peer(kind: str, name: str, **settings: Any) -> Peer:
    """`kind`: penstock or transformers, run by this Python."""
    return Peer(name, [sys.executable, "-m", "penstock.bench.cpu_peers", kind, json.dumps(settings)])


class Penstock:
    def __init__(self, *, model: str, **settings: Any) -> None:
        import penstock.engine.engine as room  # brings torch, after OpenMP's wait policy is set

        self.base_bytes = peak_bytes()
        self._engine = room.Engine.load(model, prefix_cache=False, **settings)
        self._vocabulary = self._engine.model.spec.vocab_size

    def read(self, num_tokens: int, seed: int, chunk_size: int | None = None) -> float:
        tokens = tokens_of(num_tokens, seed, self._vocabulary)
        began = time.perf_counter()
        self._engine.generate(tokens, max_tokens=1, chunk_size=chunk_size)
        return time.perf_counter() - began

    def write(self, context: int, num_tokens: int, seed: int, num_streams: int = 1) -> float:
        """Seconds for `num_tokens` of each stream, after all prompts were read."""
        from penstock.request import Token

        engine, begun = self._engine, set()
        for stream in range(num_streams):
            tokens = tokens_of(context, seed + stream, self._vocabulary)
            engine.submit(tokens, max_tokens=num_tokens + 256, ignore_eos=True)
        while len(begun) < num_streams:
            begun |= {event.request_id for event in engine.step() if isinstance(event, Token)}
        began, written = time.perf_counter(), 0
        while written < num_tokens * num_streams:
            written += sum(isinstance(event, Token) for event in engine.step())
        seconds = time.perf_counter() - began
        for request_id in begun:
            engine.abort(request_id)
        while engine.scheduler.has_work:
            engine.step()
        return seconds

    def losses(self, text: str, num_tokens: int) -> list[float]:
        """Of each token of a text, given those before it, in nats. Chunks are so small that codes stay codes."""
        tokens = self._engine.tokenizer.encode(text, add_special_tokens=True)[:num_tokens]
        found = self._engine.generate(tokens, max_tokens=1, prompt_logprobs=0, chunk_size=32).prompt_logprobs
        return [-entry.logprob for entry in found or () if entry is not None]

    def memory(self) -> list[int]:
        return [self.base_bytes, peak_bytes()]


class Transformers:
    """Whole prompts, logits of the last token only, and its own cache."""

    def __init__(self, *, model: str, dtype: str, threads: int) -> None:
        import torch
        import transformers

        from penstock.models.files import resolve
        from penstock.models.weights import open_weights

        self.base_bytes = peak_bytes()
        torch.set_num_threads(threads)
        self._torch = torch
        files = resolve(model)
        config = transformers.AutoConfig.for_model(**files.config)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        source = open_weights(files)
        for name, parameter in self._model.named_parameters():
            source.copy_into(parameter.data, name)

    def read(self, num_tokens: int, seed: int) -> float:
        tokens = self._torch.tensor([tokens_of(num_tokens, seed, self._model.config.vocab_size)])
        began = time.perf_counter()
        with self._torch.inference_mode():
            self._model(tokens, logits_to_keep=1)
        return time.perf_counter() - began

    def write(self, context: int, num_tokens: int, seed: int) -> float:
        tokens = self._torch.tensor([tokens_of(context, seed, self._model.config.vocab_size)])
        with self._torch.inference_mode():
            found = self._model(tokens, logits_to_keep=1, use_cache=True)
            began = time.perf_counter()
            for _ in range(num_tokens):
                token = found.logits[:, -1:].argmax(-1)
                found = self._model(token, past_key_values=found.past_key_values, use_cache=True)
        return time.perf_counter() - began

    def memory(self) -> list[int]:
        return [self.base_bytes, peak_bytes()]


class Machine:
    """What the processor itself can do, and models made up for it."""

    def limits(self, threads: int) -> dict[str, float]:
        """The best of some tries: a product of many bfloat16 rows, and one sum over memory."""
        import torch

        torch.set_num_threads(threads)
        one, two, memory = torch.randn(1024, 1024), torch.randn(4096, 1024), torch.ones(64 * 2**20)
        one, two = one.bfloat16(), two.bfloat16()
        product = min(_seconds(lambda: one @ two.T) for _ in range(8))
        reading = min(_seconds(memory.sum) for _ in range(8))
        flops = 2 * one.numel() * two.shape[0]
        return {"product_gflops": flops / product / 1e9, "read_gb_per_s": memory.nbytes / reading / 1e9}

    def make_random_model(self, config: dict[str, Any], folder: str) -> None:
        """A folder with a config, random weights in bfloat16, and a tokenizer that knows one word."""
        import torch
        import transformers
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        Path(folder).mkdir(parents=True)
        shape = transformers.AutoConfig.for_model(**config)
        transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(f"{folder}/tokenizer.json")


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    kinds = {"penstock": Penstock, "transformers": Transformers, "machine": Machine}
    answer_asks(kinds[sys.argv[1]](**json.loads(sys.argv[2])))
