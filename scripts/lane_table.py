"""Prints what the lanes make of each architecture: lane, way, verdict, logits by chunk size, greedy equality.

Tiny random models in float32 are saved and loaded as users do. A row is right when its logits are at most 1e-4 from
those of the whole prompt and its tokens are those of transformers' own generate: it is exact, or read whole and says
so. Otherwise the script ends with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import transformers
from logit_recorder import LogitRecorder
from rich.console import Console
from rich.table import Table
from tiny_generic import MUST_SHOW, save_causal_model
from tiny_models import prompt
from transformers.utils import logging as library

from penstock.engine.engine import Engine
from penstock.lanes.lane import GENERIC_TEXT

TOLERANCE = 1e-4
CHUNK_SIZES = (1, 3, 7, 64)
NUM_GENERATED = 32
PROMPT = prompt(150)
NUM_TOGETHER = 8
SETTINGS = {"dtype": "float32", "memory": "4GiB", "threads": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    lane: str
    verdict: str
    # Of the prompt's last row to transformers on the whole prompt, and of the answer's rows to the prompt read whole.
    difference_by_chunk_size: dict[int, float]
    is_greedy_equal: bool
    is_read_whole: bool

    @property
    def is_right(self) -> bool:
        is_exact = max(self.difference_by_chunk_size.values()) <= TOLERANCE
        return is_exact and self.is_greedy_equal


@torch.no_grad()
def causal_row(name: str, make_config: Callable[[], object], folder: Path) -> Row:
    """A causal model through the transformers lane, also where it has a native decoder."""
    model = save_causal_model(make_config(), folder)
    ids = torch.tensor([PROMPT])
    expected = model(ids, use_cache=False).logits[0, -1:].float()
    model.generation_config.eos_token_id = None
    written = model.generate(ids, max_new_tokens=NUM_GENERATED, do_sample=False)
    differences: dict[int, float] = {}
    is_equal, lane, verdict, reads_whole = True, "", "", False
    for chunk_size in (0, *CHUNK_SIZES):
        with Engine.load(str(folder), chunk_size=chunk_size, lane=GENERIC_TEXT, **SETTINGS) as engine:
            recorder = LogitRecorder(engine)
            output = engine.generate(PROMPT, max_tokens=NUM_GENERATED, ignore_eos=True)
            lane, reads_whole = engine.lane.id, engine.lane.reads_whole
            verdict = engine.lane.after_reading(len(output.chunks)).reason.split("; ")[-1]
        if chunk_size == 0:
            expected = torch.cat([expected, recorder.all[1:]])
            continue
        assert (len(output.chunks) == 1) == reads_whole, f"{name} was read in {len(output.chunks)} chunks"
        differences[chunk_size] = (recorder.all - expected).abs().max().item()
        is_equal &= list(output.token_ids) == written[0, len(PROMPT) :].tolist()
    return Row(
        name=name,
        lane=lane,
        verdict=verdict,
        difference_by_chunk_size=differences,
        is_greedy_equal=is_equal,
        is_read_whole=reads_whole,
    )


# What makes the rows of each kind of model; another lane adds its own line.
ROW_MAKERS = {"causal text": (MUST_SHOW, causal_row)}


def packing_ratio(folder: Path) -> float:
    """How many times faster eight requests are together than one after another, on a packed model."""
    config = transformers.LlamaConfig(
        vocab_size=199, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8
    )
    save_causal_model(config, folder)
    prompts = [prompt(64 + index, seed=index) for index in range(NUM_TOGETHER)]
    times: dict[str, float] = {}
    with Engine.load(str(folder), lane=GENERIC_TEXT, prefix_cache=False, **SETTINGS) as engine:
        engine.generate(prompts[0], max_tokens=4)
        started = time.perf_counter()
        alone = [engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True).token_ids for tokens in prompts]
        times["alone"] = time.perf_counter() - started
        started = time.perf_counter()
        together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
        times["together"] = time.perf_counter() - started
    assert [output.token_ids for output in together] == alone, "packed answers differ from single ones"
    return times["alone"] / times["together"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all unless given")
    names = parser.parse_args().names
    library.set_verbosity_error()
    library.disable_progress_bar()
    console = Console(width=220, highlight=False)
    table = Table(title=f"transformers {transformers.__version__}, torch {torch.__version__}, float32, 150 tokens")
    for column in ("model", "lane", "self-check", *(f"chunk {size}" for size in CHUNK_SIZES), "32 greedy", "row"):
        table.add_column(column)
    is_right = True
    with tempfile.TemporaryDirectory() as base:
        os.environ["XDG_CACHE_HOME"] = f"{base}/cache"
        for configs, make_row in ROW_MAKERS.values():
            for name in configs:
                if names and name not in names:
                    continue
                (folder := Path(base) / name).mkdir()
                row = make_row(name, configs[name], folder)
                is_right &= row.is_right
                kind = "read whole" if row.is_read_whole else "exact"
                table.add_row(
                    *(row.name, row.lane, row.verdict),
                    *(f"{value:.1e}" for value in row.difference_by_chunk_size.values()),
                    *("equal" if row.is_greedy_equal else "DIFFERENT", kind if row.is_right else "WRONG"),
                )
        console.print(table)
        (folder := Path(base) / "packed").mkdir()
        console.print(f"{NUM_TOGETHER} requests packed against each alone: {packing_ratio(folder):.2f} times faster")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
