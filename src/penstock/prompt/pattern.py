"""Which neighbouring characters a regular expression may match together.

The pattern becomes an automaton with one state per character class, over-approximated where that is simpler. Its
classes are judged by the engine that will run them, so that no table of letters or spaces can disagree with it.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_MAX_COPIES = 16  # of one repeated item, such as \d{4}
_MAX_ATOMS = 500
_CLASS_ESCAPES = "sSdDwWhHrntfvae"
# Without regard to case, other classes may match two characters: "ß" matches "ss".
_FOLDED_ALONE = frozenset(string.ascii_letters + string.digits + "'[]- ")


class UnreadablePattern(Exception):
    """The pattern uses something that looks further than one character, or that the reader does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fragment:
    """Part of a pattern; sets of atoms are bit masks."""

    first: int = 0
    last: int = 0
    alone: int = 0  # atoms whose one character is enough for a match, whatever follows it
    nullable: bool = False  # may match nothing
    optional: bool = False  # never fails: it may be left out, or takes what it can
    skippable: bool = False  # may be left out even where it could match; a possessive quantifier takes instead


_NOTHING = _Fragment(nullable=True, optional=True, skippable=True)


class Pattern:
    """Answers about pairs of neighbours that hold whatever text surrounds them."""

    def __init__(self, source: str) -> None:
        reader = _Reader(source)
        whole = reader.alternation()
        if reader.at < len(source):
            raise UnreadablePattern(f"an unmatched {source[reader.at]!r}")
        if whole.nullable:
            raise UnreadablePattern("a match of nothing")
        self._atoms = reader.matchers()
        self._folded = reader.folded
        self._follow = reader.follow
        self._whole = whole
        self._matching = lru_cache(maxsize=1 << 14)(self._judge)

    @classmethod
    def literal(cls, text: str) -> Pattern:
        return cls("".join(f"\\{c}" if c in string.punctuation else c for c in text))

    def may_join(self, left: str, right: str) -> bool:
        """Whether a match, or a lookahead, may go from the character `left` on to `right`."""
        right_atoms = self._matching(right)
        return any(self._follow[atom] & right_atoms for atom in _bits(self._matching(left)))

    def always_matches(self, character: str) -> bool:
        """A scan that arrives at this character finds a match there, so that it is never left between matches."""
        return bool(self._whole.alone & self._matching(character))

    def never_matches(self, character: str) -> bool:
        return not self._matching(character)

    def never_matches_alone(self, character: str) -> bool:
        return not self._whole.first & self._whole.last & self._matching(character)

    def _judge(self, character: str) -> int:
        mask = 0
        for atom, matcher in enumerate(self._atoms):
            # Without regard to case "ﬁ" matches "fi", so that it may stand for either letter.
            foldable = self._folded >> atom & 1 and _folds_to_ascii(character)
            if foldable or not matcher.pre_tokenize_str(character):
                mask |= 1 << atom
        return mask


class _Reader:
    """A recursive descent over the pattern that collects atoms and who may follow whom."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.follow: list[int] = []
        self.folded = 0
        self._sources: list[str] = []
        self._ignore_case = False

    def matchers(self) -> list[Split]:
        """One per atom; a character that it matches alone is removed, and nothing is left."""
        sources = (f"(?i:{s})" if self.folded >> i & 1 else s for i, s in enumerate(self._sources))
        try:
            return [Split(Regex(source), "removed") for source in sources]
        except Exception as error:  # the binding raises a bare Exception
            raise UnreadablePattern(str(error)) from error

    def alternation(self) -> _Fragment:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        first = last = alone = 0
        for branch in branches:
            first, last, alone = first | branch.first, last | branch.last, alone | branch.alone
        return _Fragment(
            first=first,
            last=last,
            alone=alone,
            nullable=any(branch.nullable for branch in branches),
            optional=any(branch.optional for branch in branches),
            skippable=any(branch.skippable for branch in branches),
        )

    def _sequence(self) -> _Fragment:
        whole = _NOTHING
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            whole = self._join(whole, self._repeated())
        return whole

    def _join(self, left: _Fragment, right: _Fragment) -> _Fragment:
        for atom in _bits(left.last):
            self.follow[atom] |= right.first
        return _Fragment(
            first=left.first | (right.first if left.nullable else 0),
            last=right.last | (left.last if right.nullable else 0),
            alone=(left.alone if right.optional else 0) | (right.alone if left.skippable else 0),
            nullable=left.nullable and right.nullable,
            optional=left.optional and right.optional,
            skippable=left.skippable and right.skippable,
        )

    def _repeated(self) -> _Fragment:
        start = self.at
        item = self._item()
        end_of_item = self.at
        least, loops, backtracks = self._quantifier()
        for _ in range(least - 1):
            end, self.at = self.at, start
            item = self._join(item, self._item())
            assert self.at == end_of_item
            self.at = end
        if loops:
            for atom in _bits(item.last):
                self.follow[atom] |= item.first
        return _Fragment(
            first=item.first,
            last=item.last,
            alone=item.alone,
            nullable=item.nullable or least == 0,
            optional=item.optional or least == 0,
            skippable=(item.skippable or least == 0) and backtracks,
        )

    def _quantifier(self) -> tuple[int, bool, bool]:
        """Reads (copies that must match, may it go round again, may it give back what it took)."""
        mark = self._peek()
        if mark in ("?", "*", "+"):
            self.at += 1
            least, loops, backtracks = int(mark == "+"), mark != "?", not self._take("+")
            self._take("?")
        elif mark == "{":
            least, loops = self._counts()
            backtracks = not self._take("+")  # if it is a second quantifier, as in Ruby, it also loops
            loops = loops or not backtracks
        else:
            return 1, False, True
        if self._peek() in ("?", "*", "+", "{"):
            raise UnreadablePattern("a quantifier after a quantifier")
        return least, loops, backtracks

    def _counts(self) -> tuple[int, bool]:
        end = self.source.find("}", self.at)
        low, comma, high = self.source[self.at + 1 : max(end, 0)].partition(",")
        if not (low + high).isdecimal() or (comma and not low) or len(low + high) > 8:
            raise UnreadablePattern("a brace that is not a plain repetition")
        self.at = end + 1
        least, most = int(low), int(high or low)
        if not max(least, 1) <= most or least > _MAX_COPIES:
            raise UnreadablePattern(f"{least} to {most} repetitions")
        return least, bool(comma) and (not high or most > max(least, 1))

    def _item(self) -> _Fragment:
        character = self.source[self.at]
        if character == "(":
            return self._group()
        if character == "[":
            return self._atom(self._bracket_length())
        if character == "\\":
            return self._escape()
        if character == "$":
            self.at += 1
            return self._glimpse()
        if character in "^*+?{":
            raise UnreadablePattern(f"{character!r}")
        return self._atom(1)

    def _atom(self, length: int, source: str | None = None) -> _Fragment:
        if len(self._sources) == _MAX_ATOMS:
            raise UnreadablePattern(f"more than {_MAX_ATOMS} character classes")
        bit = 1 << len(self._sources)
        self._sources.append(source or self.source[self.at : self.at + length])
        self.follow.append(0)
        self.at += length
        if self._ignore_case:
            if not set(self._sources[-1]) <= _FOLDED_ALONE:
                raise UnreadablePattern(f"{self._sources[-1]!r} without regard to case")
            self.folded |= bit
            return _Fragment(first=bit, last=bit)
        return _Fragment(first=bit, last=bit, alone=bit)

    def _glimpse(self) -> _Fragment:
        """An end anchor: it tells any next character from none, which is how following one would look."""
        any_character = self._atom(0, "(?m:.)")
        return _Fragment(first=any_character.first, last=any_character.last, nullable=True)

    def _bracket_length(self) -> int:
        depth, at = 0, self.at
        while at < len(self.source):
            character = self.source[at]
            at += 2 if character == "\\" else 1
            depth += (character == "[") - (character == "]")
            if depth == 0:
                return at - self.at
        raise UnreadablePattern("a bracket without an end")

    def _escape(self) -> _Fragment:
        rest = self.source[self.at + 1 :]
        letter = rest[:1]
        if letter in ("p", "P") and rest[1:2] == "{" and "}" in rest:
            return self._atom(rest.index("}") + 2)
        if letter in ("x", "u"):
            length = 2 if letter == "x" else 4
            if len(rest) > length and all(c in string.hexdigits for c in rest[1 : 1 + length]):
                return self._atom(2 + length)
        if letter and (letter in _CLASS_ESCAPES or letter in string.punctuation or letter.isspace()):
            return self._atom(2)
        if letter in ("z", "Z"):
            self.at += 2
            return self._glimpse()
        raise UnreadablePattern(f"the escape \\{letter}")

    def _group(self) -> _Fragment:
        opening = next((o for o in ("(?:", "(?i:", "(?=", "(?!", "(?>") if self.source.startswith(o, self.at)), "(")
        if opening == "(" and self.source.startswith("(?", self.at):
            raise UnreadablePattern(f"the group {self.source[self.at : self.at + 4]!r}")
        self.at += len(opening)
        ignored_case, self._ignore_case = self._ignore_case, self._ignore_case or opening == "(?i:"
        inner = self.alternation()
        self._ignore_case = ignored_case
        if not self._take(")"):
            raise UnreadablePattern("a group without an end")
        if opening in ("(?=", "(?!"):  # what it looks at is followed as if it were consumed
            return _Fragment(first=inner.first, last=inner.last, nullable=True)
        if opening == "(?>":
            return _Fragment(first=inner.first, last=inner.last, nullable=inner.nullable)
        return inner

    def _peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def _take(self, character: str) -> bool:
        taken = self._peek() == character
        self.at += taken
        return taken


def _folds_to_ascii(character: str) -> bool:
    folded = character.casefold() + character.lower() + character.upper()
    return not character.isascii() and any(map(str.isascii, folded))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
