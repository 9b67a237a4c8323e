"""Messages in turns that a template takes, where it refuses or drops those that came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from penstock.errors import InvalidPrompt
from penstock.prompt.render import ChatTemplate

Turn = dict[str, Any]
BETWEEN = "\n\n"  # texts that become one message


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Which turns a template prints; found by having it print some."""

    system: bool  # as the first message
    late_system: bool  # after others
    repeated_user: bool


@lru_cache(maxsize=8)
def turn_rules(template: ChatTemplate) -> TurnRules:
    return TurnRules(
        system=_prints(template, "system", "user"),
        late_system=_prints(template, "system", "user", "system", "assistant", "user"),
        repeated_user=_prints(template, "user", "user"),
    )


def fitted(turns: Sequence[Turn], rules: TurnRules) -> list[Turn]:
    """Keeps every text, and their order. What the system says where it has no place is said as the user."""
    found = list(turns)
    if not rules.late_system:
        num_first = next((i for i, turn in enumerate(found) if turn["role"] != "system"), len(found))
        first = [_joined(found[:num_first])] if num_first else []
        found = [*first, *map(_as_user, found[num_first:])]
    if not rules.system:
        found = [*map(_as_user, found)]
    if rules.repeated_user:
        return found
    groups = (list(group) for _, group in groupby(enumerate(found), key=_speaker))
    return [_joined([turn for _, turn in group]) for group in groups]


def _speaker(numbered: tuple[int, Turn]) -> int:
    """Gives the user's turns beside each other one number, and every other turn its own."""
    index, turn = numbered
    return -1 if turn["role"] == "user" else index


def _as_user(turn: Turn) -> Turn:
    return turn | {"role": "user"} if turn["role"] == "system" else turn


def _joined(turns: Sequence[Turn]) -> Turn:
    if len(turns) == 1:
        return turns[0]
    contents = [turn["content"] for turn in turns]
    if all(isinstance(content, str) for content in contents):
        return turns[0] | {"content": BETWEEN.join(contents)}
    return turns[0] | {"content": [part for content in contents for part in _parts(content)]}


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _prints(template: ChatTemplate, *roles: str) -> bool:
    turns = [{"role": role, "content": f"probe-{index}"} for index, role in enumerate(roles)]
    try:
        text = template.render(turns)
    except InvalidPrompt:
        return False
    return all(turn["content"] in text for turn in turns)
