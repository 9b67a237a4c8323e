"""`penstock serve` with a model whose tokens follow a script; template, chunks, cache, readers and streams are real.

A script is a list of answers. A prompt that offers tools is answered with the one after as many results as it holds,
another prompt with the last one. Several scripts stand by a word, and a prompt takes the first whose word it has.

python tests/scripted_server.py SCRIPT.json MODEL [flags of serve]
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.cli.main import main
from penstock.engine.engine import Engine
from penstock.server import service

SURE = 1e4
RESULT, TOOLS = "<|im_start|>tool\n", "You may call functions"


class ScriptedLane:
    """The lane of a model: it runs, and then the logits are those of a script."""

    def __init__(self, lane: Any) -> None:
        self._lane = lane
        self.answers: dict[int, tuple[int, list[int]]] = {}  # by sequence: tokens of its prompt, tokens to write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    def run(self, inputs: Any) -> torch.Tensor:
        logits = torch.full_like(self._lane.run(inputs), -SURE)
        for row, place in enumerate(inputs.logit_rows.tolist()):
            num_prompt, answer = self.answers[inputs.sequence_ids[bisect_right(inputs.query_starts, place) - 1]]
            num_written = int(inputs.positions_T[place]) + 1 - num_prompt
            logits[row, answer[min(num_written, len(answer) - 1)]] = SURE
        return logits


class ScriptedEngine(Engine):
    scripts: dict[str, list[str]]

    def __init__(self, model: Any, **settings: Any) -> None:
        self._scripted = ScriptedLane(model.lane)
        super().__init__(replace(model, lane=self._scripted), **settings)

    def warm_up(self) -> None:
        """Warming up asks without a script."""

    def submit(self, prompt: Any, **settings: Any) -> Any:
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        script = next(script for word, script in self.scripts.items() if word in text)
        written = script[min(text.count(RESULT), len(script) - 1) if TOOLS in text else -1]
        tokens = [*self.tokenizer.encode(written, add_special_tokens=False), min(self.model.eos_ids)]
        handle = super().submit(prompt, **settings)
        self._scripted.answers[int(handle)] = (len(prompt), tokens)
        return handle


if __name__ == "__main__":
    script = json.loads(Path(sys.argv.pop(1)).read_text())
    ScriptedEngine.scripts = script if isinstance(script, dict) else {"": script}
    service.Engine = ScriptedEngine  # ty: ignore
    sys.argv.insert(1, "serve")
    main()
