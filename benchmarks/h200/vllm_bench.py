"""vLLM over the work of `penstock bench gpu`, measured by the same code: prints RESULT and JSON.

`python benchmarks/h200/vllm_bench.py --tokens 8192` with vLLM installed; `--tokens` is its budget of tokens per step.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are run and timed in this process, as ours are
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import vllm
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from penstock.bench.gpu import GpuBench, Mixed, Work
from penstock.engine.random_model import QWEN3_8B
from penstock.request import Token


class VllmEngine:
    """The few calls that the benchmark makes of an engine."""

    def __init__(self, folder: str, *, num_batched_tokens: int) -> None:
        self._engine = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=140_000,
            max_num_batched_tokens=num_batched_tokens,
            max_num_seqs=256,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.85,
            disable_log_stats=True,
            seed=0,
        ).llm_engine
        self._num_submitted = 0
        self.tells_every_token = False  # what nobody asks for, it need not make

    @property
    def has_work(self) -> bool:
        return self._engine.has_unfinished_requests()

    def warm_up(self) -> None:
        """It has done so when it was made."""

    def submit(self, prompt: tuple[int, ...], *, max_tokens: int, ignore_eos: bool) -> int:
        greedy = vllm.SamplingParams(
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=ignore_eos,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self.tells_every_token else RequestOutputKind.FINAL_ONLY,
        )
        request_id = self._num_submitted
        self._num_submitted += 1
        self._engine.add_request(str(request_id), TokensPrompt(prompt_token_ids=list(prompt)), greedy)
        return request_id

    def step(self) -> list[Token]:
        """One for each sequence that got a token and is told of it."""
        return [
            Token(request_id=int(found.request_id), token_id=found.outputs[0].token_ids[-1], text="", logprob=None)
            for found in self._engine.step()
        ]


class VllmBench(GpuBench):
    """Only beside decodes the time of every token counts; elsewhere vLLM tells of an answer when it is whole."""

    def _beside_decodes(self) -> Mixed:
        engine: Any = self.engine
        engine.tells_every_token = True
        try:
            return super()._beside_decodes()
        finally:
            engine.tells_every_token = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--parts", default="pdmo")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_8B))
        engine: Any = VllmEngine(folder, num_batched_tokens=asked.tokens)
        measured = VllmBench(engine, Work(), lambda name, value: print(f"{name}: {value}", flush=True))
        measured.warm_up()
        found = measured.run(asked.parts)
    facts = {"engine": "vllm", "version": vllm.__version__, "batched": asked.tokens}
    print("RESULT", json.dumps(facts | found))


if __name__ == "__main__":
    main()
