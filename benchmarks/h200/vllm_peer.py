"""Gives vLLM the work of `penstock bench gpu`, and prints `RESULT {json}` with the same keys: the two lines divide.

Run it with the interpreter that has vLLM. Of Penstock it needs the files alone, which import nothing but Python there:

    PYTHONPATH=src python benchmarks/h200/vllm_peer.py

Environment: SHAPE, one of those of `bench gpu --shape`; BATCHED, its token budget per step; ONLY, which parts of pdmos;
BUDGETS, such as 2048,512: part m again with the scheduler of the same process held to so many tokens a step.
Every engine has weights drawn alike, the same token ids and the same order of requests.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from penstock.bench.work import CONTEXT, GREEDY, MAX_RUNNING, SHAPES, Work, WorkRun

PARTS = "pdmos"
NUM_WARM_TOKENS = 4096
SHARE_OF_CARD = 0.85
# One process, so that a step is a call; no network; greedy answers need no sampler of FlashInfer's, which compiles.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# FlashInfer's delta rule wants a compiler that not every machine has.
OF_SHAPE: dict[str, dict[str, Any]] = {"qwen3-next": {"gdn_prefill_backend": "triton"}}


class Vllm:
    """vLLM as the work sees any engine: whole batches by `generate`, as users call it, and steps one by one."""

    def __init__(self, config: dict[str, Any], batched: int, **settings: Any) -> None:
        from vllm import LLM

        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "config.json").write_text(json.dumps(config))
        self._llm = LLM(
            model=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_batched_tokens=batched,
            max_num_seqs=MAX_RUNNING,
            enable_prefix_caching=False,
            gpu_memory_utilization=SHARE_OF_CARD,
            disable_log_stats=True,
            seed=0,
            **settings,
        )
        self._numbers = itertools.count()
        self.sampling = GREEDY

    def use_budget(self, num_tokens: int) -> None:
        """Holds the scheduler to so many tokens a step; at most those that it began with."""
        self._llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = num_tokens

    def sharpen(self, factor: float) -> None:
        self._llm.apply_model(lambda model: model.lm_head.weight.data.mul_(factor).shape)

    @property
    def has_work(self) -> bool:
        return self._llm.llm_engine.has_unfinished_requests()

    def submit(self, prompt: Sequence[int], num_tokens: int) -> int:
        number = next(self._numbers)
        self._llm.llm_engine.add_request(str(number), self._prompt(prompt), self._sampling(num_tokens))
        return number

    def step(self) -> Collection[int]:
        """Every output of a step is a request that got a token; one that only read has none."""
        return [int(output.request_id) for output in self._llm.llm_engine.step() if output.outputs[0].token_ids]

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> None:
        import torch

        sampling = [self._sampling(count) for count in num_tokens]
        self._llm.generate([self._prompt(prompt) for prompt in prompts], sampling, use_tqdm=False)
        torch.cuda.synchronize()

    def _prompt(self, tokens: Sequence[int]) -> Any:
        from vllm.inputs import TokensPrompt

        return TokensPrompt(prompt_token_ids=list(tokens))

    def _sampling(self, num_tokens: int) -> Any:
        from vllm import SamplingParams

        fixed: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
        fixed |= {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
        return SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, **fixed)


def work_of(shape: str) -> Work:
    return Work.of_vocabulary(SHAPES[shape]["vocab_size"])


def main() -> None:
    shape, parts = os.environ.get("SHAPE", "qwen3-8b"), os.environ.get("ONLY", PARTS)
    if shape not in SHAPES:
        sys.exit(f"SHAPE is {shape!r}; it must be one of {', '.join(SHAPES)}.")
    if wrong := set(parts) - set(PARTS):
        sys.exit(f"ONLY has {''.join(sorted(wrong))!r}; the parts are {', '.join(PARTS)}.")
    batched = int(os.environ.get("BATCHED", "8192"))
    os.environ.update(VLLM_ENVIRONMENT | dict(os.environ))  # what is set already holds
    began = time.perf_counter()

    def report(name: str, value: object) -> None:
        print(f"{name}: {value}", flush=True)

    import torch
    import vllm

    subject = Vllm(SHAPES[shape], batched, **OF_SHAPE.get(shape, {}))
    report("engine up", f"{time.perf_counter() - began:.1f} s after it was asked for")
    run = WorkRun(subject, work_of(shape), report)
    for _ in range(2):
        run.seconds([run.work.tokens(NUM_WARM_TOKENS, 0)], [4])
    facts = {"engine": "vllm", "version": vllm.__version__, "shape": shape, "batched": batched}
    facts |= {"device": torch.cuda.get_device_name()}
    found = run.run(parts)
    for budget in filter(None, os.environ.get("BUDGETS", "").split(",")):
        subject.use_budget(int(budget))
        found[f"mixed_of_{int(budget)}"] = asdict(run.beside_decodes())
    print("RESULT", json.dumps({**facts, **found}))


if __name__ == "__main__":
    main()
