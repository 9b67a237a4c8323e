"""`DatasetReader`, which is `penstock.ray.Reader`: documents of a Ray dataset, read by an engine in each actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from penstock.config import DEFAULT_MODEL
from penstock.engine.engine import Engine
from penstock.errors import InvalidSetting, PenstockError
from penstock.ray.fleet import share_of_memory
from penstock.request import Failed, Finished, Output


class DatasetReader:
    """Answers the rows of a dataset: `dataset.map_batches(penstock.ray.Reader, fn_constructor_kwargs={...})`.

    `column` has texts or messages. The answer comes into `answer_column`, and beside it the tokens of the prompt and
    those that the cache held. `memory` unless given: what the node has free, shared by `num_actors`. A row that is
    refused gets an empty answer and the reason in `error`.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        column: str = "prompt",
        answer_column: str = "answer",
        num_actors: int = 1,
        sampling: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if num_actors < 1:
            raise InvalidSetting(f"num_actors is {num_actors}; give the number of actors of map_batches, 1 or more.")
        settings.setdefault("memory", share_of_memory(num_actors))
        settings.setdefault("threads", max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
        self._column, self._answer_column = column, answer_column
        self._sampling = dict(sampling or {})
        self._engine = Engine.load(model, **settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._column not in batch:
            names = ", ".join(map(repr, batch))
            raise InvalidSetting(f"The rows have no column {self._column!r}; they have {names}. Give column=NAME.")
        outputs, errors = self._answers([_plain(one) for one in batch[self._column]])
        answered: dict[str, list[Any]] = {
            self._answer_column: ["" if one is None else one.text for one in outputs],
            "prompt_tokens": [0 if one is None else one.num_prompt_tokens for one in outputs],
            "cached_tokens": [0 if one is None else one.num_cached_tokens for one in outputs],
            "error": errors,
        }
        return batch | {name: np.asarray(values) for name, values in answered.items()}

    def _answers(self, prompts: Sequence[Any]) -> tuple[list[Output | None], list[str]]:
        """Runs the prompts together; of one that is refused or fails there is an error in place of an output."""
        outputs: list[Output | None] = [None] * len(prompts)
        errors, row_by_id = [""] * len(prompts), dict[int, int]()
        for row, prompt in enumerate(prompts):
            try:
                row_by_id[self._engine.submit(prompt, **self._sampling)] = row
            except PenstockError as error:
                errors[row] = str(error)
        while row_by_id:
            for event in self._engine.step():
                if isinstance(event, Finished):
                    outputs[row_by_id.pop(event.request_id)] = event.output
                elif isinstance(event, Failed):
                    errors[row_by_id.pop(event.request_id)] = str(event.error)
        return outputs, errors


def _plain(prompt: Any) -> Any:
    """Gives a text, or messages, as the engine takes them."""
    return str(prompt) if isinstance(prompt, str) else [dict(message) for message in prompt]
