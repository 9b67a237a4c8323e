"""What `selfcheck` and `attach` answer for one causal class, and whether the answer is true of a tiny model of it."""

# T tokens, V vocabulary

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from tiny_causal import VOCABULARY, CannotBuild, tiny_causal_model

import penstock
from penstock.attention.cpu import CpuAttention
from penstock.errors import PenstockError
from penstock.lanes.generic_text import EnteringModel
from penstock.proof.comparison import spans
from penstock.proof.text import BLOCK_SIZE, PROMPT_LENGTHS, step_inputs
from penstock.proof.verdict import Verdict

EXACT, WHOLE, REFUSED, NOT_BUILT = "exact", "read whole", "refused", "not built"
TRACEBACK, WRONG = "traceback", "wrong"
NUM_PROMPTS = 3
MAX_FAILURES = 1  # of three prompts: near-tied routers flip on rounding
TOLERANCE = 1e-4  # times the deviation of the logits, where that is above 1
NUM_TOKENS = 45
NUM_WRITTEN = 3
CHUNKING = (5, 1, 17, 2)
ATTACHED_CHUNKS = (17, 5)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one of the two calls said of a class."""

    kind: str
    reason: str


def answers(model_type: str) -> dict[str, Answer]:
    """By the name of the call. A class that transformers itself cannot run small has the same answer for both."""
    try:
        model = tiny_causal_model(model_type)
    except CannotBuild as error:
        return dict.fromkeys(("selfcheck", "attach"), Answer(kind=NOT_BUILT, reason=str(error)))
    return {"selfcheck": _answer(_checked, model), "attach": _answer(_attached, model)}


def _answer(ask: Callable[[Any], Answer], model: Any) -> Answer:
    try:
        return ask(copy.deepcopy(model))
    except PenstockError as error:
        return Answer(kind=REFUSED, reason=str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(kind=TRACEBACK, reason=f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})")


# --- selfcheck ----------------------------------------------------------------------------------------------


def _checked(model: Any) -> Answer:
    """The verdict, held to the model itself: read in the way that it allows, whole where it allows no chunks."""
    verdict = penstock.selfcheck(model)
    chunking = CHUNKING if verdict.exact else (NUM_TOKENS,)
    pairs = [(_read(copy.deepcopy(model), verdict, tokens, chunking), whole(model, tokens)) for tokens in prompts()]
    if not agree(pairs):
        return Answer(kind=WRONG, reason=f"{verdict.summary}, but the logits differ by {largest(pairs):.1e}")
    return Answer(kind=EXACT if verdict.exact else WHOLE, reason=f"{verdict.way.value}: {verdict.reason}")


@torch.no_grad()
def _read(model: Any, verdict: Verdict, tokens: list[int], chunking: tuple[int, ...]) -> torch.Tensor:
    entering = EnteringModel(model, verdict)
    ways: Any = entering.caches()
    if entering.calls:
        num_slots = -(-max(PROMPT_LENGTHS) // BLOCK_SIZE) * BLOCK_SIZE
        ways = entering.joined(CpuAttention(entering.pages(num_slots), BLOCK_SIZE))
    steps = spans(len(tokens), cycle(chunking))
    return torch.cat([ways.run(step_inputs([tokens], [span], CPU)) for span in steps])


# --- attach -------------------------------------------------------------------------------------------------


def _attached(model: Any) -> Answer:
    """`generate` of the attached model beside the plain one, which reads the whole prompt in its first call."""
    try:
        plain = [_written(model, tokens) for tokens in prompts()]
    except Exception as error:
        with penstock.attach(model):
            return Answer(kind=NOT_BUILT, reason=f"its own generate fails: {_first_line(error)}")
    for chunk_size in ATTACHED_CHUNKS:
        with penstock.attach(model, chunk_size=chunk_size) as attachment:
            found = [_written(model, tokens) for tokens in prompts()]
        assert attachment.reading is not None
        assert attachment.reading.applied
        pairs = list(zip(found, plain, strict=True))
        if not agree(pairs):
            return Answer(kind=WRONG, reason=f"chunks of {chunk_size}: the logits differ by {largest(pairs):.1e}")
    return Answer(kind=EXACT, reason=f"generate agrees in chunks of {' and '.join(map(str, ATTACHED_CHUNKS))}")


def _written(model: Any, tokens: list[int]) -> torch.Tensor:
    """[written tokens, V] logits."""
    output = model.generate(
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=NUM_WRITTEN,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.cat(output.logits).float()


# --- the truth ----------------------------------------------------------------------------------------------


@torch.no_grad()
def whole(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, V] logits of the plain forward over the whole prompt."""
    return model(input_ids=torch.tensor([tokens])).logits[0].float()


def prompts() -> list[list[int]]:
    """Of ordinary tokens: the last ones of the vocabulary may stand for images."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY - 9, (NUM_PROMPTS, NUM_TOKENS), generator=generator).tolist()


def agree(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    limits = [(_distance(own, true), TOLERANCE * max(1.0, float(true.std()))) for own, true in pairs]
    return sum(not distance <= limit for distance, limit in limits) <= MAX_FAILURES


def largest(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max(_distance(own, true) for own, true in pairs)


def _distance(own: torch.Tensor, true: torch.Tensor) -> float:
    return float((own - true).abs().max())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
