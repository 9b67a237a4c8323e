"""Inputs that somebody broke on purpose, and what a reader makes of them: seeded, so that a find comes again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hang_bound import HANG_S, within

from penstock.errors import PenstockError
from penstock.plan.machine import resident_bytes

MAX_GROWTH_BYTES = 500_000_000
MAX_REFUSAL_LETTERS = 4000
FEW, MANY = 200, 10_000
# Where readers stumble: borders of numbers, ends of texts and levels, and bytes that are no UTF-8.
_TOKENS = [
    *(b"0", b"-1", b"1e999", b"NaN", b"18446744073709551615", b"9" * 5000, b"null", b"true", b'""', b"[]", b"{}"),
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"'", b"\\", b"\n", b"}", b"]", b"{{", b"}}", b"{%", b"%}", b"="),
    *(b"[" * 3000, b'{"a":' * 3000, b"(" * 300, b"\\ud800", b"\\u0000", b"A" * 70_000),
]
_LEAVES = [None, True, False, 0, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "", "a", "\x00", "é", [], {}, [1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    num_inputs: int
    num_refused: int
    slowest_s: float
    growth_bytes: int

    def row(self) -> str:
        return (
            f"| {self.name} | {self.num_inputs:,} | {self.num_refused:,} | {self.slowest_s:.3f} | "
            f"{self.growth_bytes / 1e6:.0f} |"
        )


def broken(wholes: Sequence[bytes], number: int, seed: int = 28) -> Iterator[bytes]:
    """Gives so many inputs made from whole ones: bytes changed, cut, doubled or put in, or values of JSON swapped."""
    choice = random.Random(seed)
    documents = [_document(whole) for whole in wholes]
    for _ in range(number):
        index = choice.randrange(len(wholes))
        if documents[index] is not None and choice.random() < 0.5:
            yield json.dumps(_swapped(choice, documents[index])).encode()
        else:
            yield _bent(choice, wholes[index])


def read_broken(
    name: str, read: Callable[[bytes], object], wholes: Sequence[bytes], number: int, *, seed: int = 28
) -> Outcome:
    """Reads so many broken inputs; each ends before it would be said to hang."""
    with ThreadPoolExecutor(1) as thread:
        seconds: list[float] = []  # of each that was read
        outcome = thread.submit(_read_broken, name, read, wholes, number, seed, seconds)
        while not outcome.done():
            num_read = len(seconds)
            assert within(HANG_S, lambda before=num_read: outcome.done() or len(seconds) > before), f"{name} hangs"
        return outcome.result()


def _read_broken(
    name: str,
    read: Callable[[bytes], object],
    wholes: Sequence[bytes],
    number: int,
    seed: int,
    seconds: list[float],
) -> Outcome:
    """Reads each of them, and lets nothing through but our own errors; a whole one is read first and must be good."""
    for whole in wholes:
        read(whole)
    before, most, num_refused, longest = resident_bytes(), 0, 0, 0
    for index, content in enumerate(broken(wholes, number, seed)):
        began_at = time.perf_counter()
        try:
            read(content)
        except PenstockError as error:
            num_refused += 1
            longest = max(longest, len(str(error)))
        except BaseException as error:
            error.add_note(f"input {index} of {name}, seed {seed}: {content[:400]!r}")
            raise
        seconds.append(time.perf_counter() - began_at)
        most = max(most, resident_bytes())
    assert most - before < MAX_GROWTH_BYTES
    assert num_refused
    assert longest < MAX_REFUSAL_LETTERS
    return Outcome(
        name=name,
        num_inputs=number,
        num_refused=num_refused,
        slowest_s=max(seconds),
        growth_bytes=max(0, most - before),
    )


def _document(whole: bytes) -> Any:
    try:
        return json.loads(whole)
    except ValueError:
        return None


def _bent(choice: random.Random, whole: bytes) -> bytes:
    content = bytearray(whole)
    for _ in range(choice.choice((1, 1, 2, 8))):
        at = choice.randrange(len(content) + 1)
        match choice.randrange(6):
            case 0 | 1 if at < len(content):
                content[at] = choice.choice((0, 1, 9, 127, 128, 255, choice.randrange(256)))
            case 2:
                del content[at : at + choice.choice((1, 4, 64, len(content)))]
            case 3:
                content[at:at] = choice.choice(_TOKENS)
            case 4:
                content[at:at] = content[at : at + choice.randrange(1, 200)]
            case _:
                content[at : at + choice.randrange(1, 9)] = choice.choice(_TOKENS)
    return bytes(content)


def _swapped(choice: random.Random, document: Any) -> Any:
    """Copies a document with one to three of its values, wherever they lie, turned into others."""
    changed = json.loads(json.dumps(document))
    for _ in range(choice.choice((1, 1, 2, 3))):
        holder = changed
        while isinstance(holder, (dict, list)) and holder:
            key = choice.choice(list(holder)) if isinstance(holder, dict) else choice.randrange(len(holder))
            inner = holder[key]
            if not isinstance(inner, (dict, list)) or not inner or choice.random() < 0.2:
                _swap(choice, holder, key)
                break
            holder = inner
    return changed


def _swap(choice: random.Random, holder: Any, key: Any) -> None:
    if choice.random() < 0.2:
        del holder[key]
    elif choice.random() < 0.1:
        deep: Any = 0
        for _ in range(choice.choice((70, 900))):
            deep = [deep] if choice.random() < 0.5 else {"a": deep}
        holder[key] = deep
    elif isinstance(holder[key], str) and choice.random() < 0.4:
        holder[key] = holder[key] * choice.choice((2, 50)) or "x"
    elif type(holder[key]) is int and choice.random() < 0.4:
        holder[key] = holder[key] * choice.choice((-1, 3, 1000, 10**9))
    else:
        holder[key] = json.loads(json.dumps(choice.choice(_LEAVES)))
