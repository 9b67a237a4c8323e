"""Finds where a text may be cut so that its parts, encoded one after the other, give the ids of the whole.

A cut lies between two characters, `left` and `right`, with `beyond` after them. It is accepted only if, whatever
surrounds these three, each step of the tokenizer treats the two sides apart:
- no added token contains the pair or ends with `left`, and `left` is not whitespace that one could strip;
- the normalizer maps the sides one by one;
- some pre-tokenizer splits there and the ones before it do not look across, or else no token of a BPE model joins them.
The part after a cut is encoded behind `left`, whose own ids are then dropped: whatever a tokenizer does only at the
start of a text then happens to that character.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import tokenizers

from penstock.prompt.pattern import Pattern, UnreadablePattern

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# These decide between two neighbours by the two alone, so that asking about the pair is a proof.
_DECIDED_BY_PAIRS = frozenset(
    {"BertPreTokenizer", "CharDelimiterSplit", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
)

# These map each grapheme, or each starter with its marks, by itself.
_DECIDED_BY_CHARACTERS = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "StripAccents"}
)

# Ranges in which letters, digits and punctuation neither combine with a neighbour nor join its grapheme.
_STARTERS = (
    (0x20, 0x7E), (0xA1, 0xA8), (0xAB, 0xAC), (0xB0, 0x2AF), (0x386, 0x482), (0x48A, 0x556), (0x561, 0x587),
    (0x5D0, 0x5EA), (0x60C, 0x60C), (0x61B, 0x61B), (0x61F, 0x64A), (0x660, 0x66D), (0x671, 0x6D4), (0x904, 0x939),
    (0x964, 0x96F), (0x985, 0x9B9), (0xA05, 0xA39), (0xA85, 0xAB9), (0xB85, 0xBB9), (0xC05, 0xC39), (0xC85, 0xCB9),
    (0xD05, 0xD39), (0xE01, 0xE30), (0x10A0, 0x10FF), (0x1E00, 0x1FBC), (0x2010, 0x2027), (0x2581, 0x2581),
    (0x3001, 0x3003), (0x3008, 0x3011), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x3400, 0x4DB5), (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3), (0xFF01, 0xFF5E),
)  # fmt: skip
_STARTER_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lo", "Nd", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc"})


class Uncuttable(Exception):
    """Nothing can be proven about this tokenizer; the message says which part is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What the characters around a cut have become so far, each in every possible context."""

    left: str
    right: str
    beyond: str


class Separation(Enum):
    APART = "the sides are in different pieces from here on"
    JOINED = "what happens on one side may depend on the other"


Normalize = Callable[[Border], Border | None]
# From a pair of neighbours to a verdict; or, if both stay in one piece, to the pair as the next step sees it.
Judge = Callable[[str], Separation | str]


class Cuts:
    """The proof for one tokenizer, given as its JSON; raises Uncuttable where it cannot be made."""

    def __init__(self, spec: dict[str, Any], backend: tokenizers.Tokenizer) -> None:
        if spec["model"].get("dropout"):
            raise Uncuttable("BPE dropout makes the encoding random")
        self._added = _AddedTokens(spec["added_tokens"], backend.normalizer)
        self._normalizers = [_normalizer(part) for part in flat(spec["normalizer"], "normalizers")]
        self._judges = [_pre_tokenizer(part) for part in flat(spec["pre_tokenizer"], "pretokenizers")]
        self._judges.append(_model(spec["model"], backend))
        self.between = lru_cache(maxsize=1 << 16)(self._between)

    def last_in(self, text: str, searched: int) -> int | None:
        """The last cut in `text` after position `searched` for which the next character is known."""
        for position in range(len(text) - 2, max(searched, 0), -1):
            if self.between(text[position - 1], text[position], text[position + 1]):
                return position
        return None

    def _between(self, left: str, right: str, beyond: str) -> bool:
        if left.isspace() or not self._added.leave_alone(left, right):
            return False
        border: Border | None = Border(left=left, right=right, beyond=beyond)
        for normalize in self._normalizers:
            border = normalize(border)
            if border is None:
                return False
        left, right = border.left[-1], border.right[0]
        return self._added.leave_alone_normalized(left, right) and self._are_apart(left + right)

    def _are_apart(self, pair: str) -> bool:
        for judge in self._judges:
            verdict = judge(pair)
            if isinstance(verdict, Separation):
                return verdict is Separation.APART
            pair = verdict
        return False


def describe(cuts: Cuts) -> str | None:
    """The ordinary places where `cuts` accepts a cut, in words; None if there are none."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    places = {
        "a word and a space": [(a, " ", "t") for a in letters],
        "a word and a comma": [(a, ",", " ") for a in letters],
        "a word and a digit": [(a, "7", "7") for a in letters],
        "two ideographs": [("我", "们", "好"), ("的", "心", "里"), ("水", "木", "火")],
    }
    found = [name for name, borders in places.items() if any(cuts.between(*border) for border in borders)]
    return "cut between " + ", or ".join(found) if found else None


class _AddedTokens:
    """Added tokens are found before everything else, so that no cut may touch where one could be."""

    def __init__(self, specs: list[dict[str, Any]], normalizer: Any) -> None:
        normalized = [spec for spec in specs if spec["normalized"]]
        contents = [normalizer.normalize_str(s["content"]) if normalizer else s["content"] for s in normalized]
        if not all(contents) or not all(spec["content"] for spec in specs):
            raise Uncuttable("an added token is empty, or is once it is normalized")
        self._pairs = _neighbours(spec["content"] for spec in specs)
        self._endings = {spec["content"][-1] for spec in specs}
        self._pairs_normalized = _neighbours(contents)
        self._endings_normalized = {content[-1] for content in contents}
        self._strips_normalized = any(spec["lstrip"] or spec["rstrip"] for spec in normalized)

    def leave_alone(self, left: str, right: str) -> bool:
        return left not in self._endings and left + right not in self._pairs

    def leave_alone_normalized(self, left: str, right: str) -> bool:
        if self._strips_normalized and left.isspace():
            return False
        return left not in self._endings_normalized and left + right not in self._pairs_normalized


def _neighbours(texts: Iterable[str]) -> set[str]:
    return {text[i : i + 2] for text in texts for i in range(len(text) - 1)}


def flat(spec: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of the tokenizer, one after the other; `key` names what a sequence of them holds."""
    if spec is None:
        return
    if spec["type"] == "Sequence":
        for part in spec[key]:
            yield from flat(part, key)
    else:
        yield spec


def _component(kind: str, spec: dict[str, Any]) -> Any:
    """One step of the tokenizer by itself."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps({"model": model, kind: spec})), kind)


# Normalizers


def _normalizer(spec: dict[str, Any]) -> Normalize:
    kind = spec["type"]
    if kind in _DECIDED_BY_CHARACTERS:
        return _by_characters(_component("normalizer", spec))
    if kind == "Replace":
        return _replacing(_pattern(spec["pattern"]), spec["content"])
    if kind == "Strip":
        return lambda border: None if border.left[-1].isspace() else border
    if kind == "Prepend":  # changes only the start of a text, which lies before `left`
        return lambda border: border
    raise Uncuttable(f"the {kind} normalizer is not known to act on both sides of a cut apart")


def _by_characters(component: Any) -> Normalize:
    def normalize(border: Border) -> Border | None:
        if not all(map(_is_starter, border.left + border.right + border.beyond)):
            return None
        left, right, beyond = map(component.normalize_str, (border.left, border.right, border.beyond))
        return Border(left=left, right=right, beyond=beyond) if left and right and beyond else None

    return normalize


@lru_cache(maxsize=1 << 14)
def _is_starter(character: str) -> bool:
    if character in " \t\n▁":
        return True
    in_range = any(low <= ord(character) <= high for low, high in _STARTERS)
    return in_range and unicodedata.category(character) in _STARTER_CATEGORIES


def _replacing(pattern: Pattern, content: str) -> Normalize:
    def normalize(border: Border) -> Border | None:
        left, right, beyond = border.left, border.right, border.beyond
        if len(left) > 1 or len(right) > 1 or len(beyond) > 1 or pattern.may_join(left, right):
            return None
        if not pattern.never_matches(left) or not pattern.never_matches(beyond):
            return None
        if pattern.never_matches_alone(right):
            return border
        is_replaced = pattern.always_matches(right) and content
        return Border(left=left, right=content, beyond=beyond) if is_replaced else None

    return normalize


def _pattern(spec: dict[str, str]) -> Pattern:
    try:
        return Pattern(spec["Regex"]) if "Regex" in spec else Pattern.literal(spec["String"])
    except UnreadablePattern as error:
        raise Uncuttable(f"a pattern has {error}, about which nothing is proven") from error


# Pre-tokenizers


def _pre_tokenizer(spec: dict[str, Any]) -> Judge:
    kind = spec["type"]
    if kind in _DECIDED_BY_PAIRS:
        return _by_pairs(_component("pre_tokenizer", spec))
    if kind == "Split":
        return _splitting(_pattern(spec["pattern"]), spec["behavior"], invert=spec["invert"])
    if kind == "ByteLevel":
        return _byte_level(spec)
    if kind == "Metaspace":
        return _metaspace(spec)
    raise Uncuttable(f"the {kind} pre-tokenizer is not known to split by neighbouring characters")


def _by_pairs(component: Any) -> Judge:
    def judge(pair: str) -> Separation | str:
        pieces = component.pre_tokenize_str(pair)
        return pair if any(end - start == 2 for _, (start, end) in pieces) else Separation.APART

    return judge


def _splitting(pattern: Pattern, behavior: str, *, invert: bool) -> Judge:
    def is_split(left: str, right: str) -> bool:
        if behavior in ("Isolated", "Removed"):
            return pattern.always_matches(left) or pattern.always_matches(right)
        if behavior == "MergedWithPrevious" and not invert:
            return pattern.always_matches(left)
        return behavior == "MergedWithNext" and not invert and pattern.always_matches(right)

    def judge(pair: str) -> Separation | str:
        if pattern.may_join(*pair):
            return Separation.JOINED
        return Separation.APART if is_split(*pair) else pair

    return judge


def _byte_level(spec: dict[str, Any]) -> Judge:
    if not spec.get("use_regex", True):
        return lambda pair: Separation.JOINED
    # This pattern matches everywhere, so that no pair is left for later steps, which see bytes.
    return _splitting(Pattern(_GPT2_PATTERN), "Isolated", invert=False)


def _metaspace(spec: dict[str, Any]) -> Judge:
    mark, splits = spec["replacement"], spec.get("split", True)

    def judge(pair: str) -> Separation | str:
        pair = pair.replace(" ", mark)
        return Separation.APART if splits and pair[1] == mark else pair

    return judge


# Models


def _model(spec: dict[str, Any], backend: tokenizers.Tokenizer) -> Judge:
    """A BPE model without pre-tokenizer merges neighbours only into tokens that hold them side by side."""
    by_place = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if spec["type"] != "BPE" or any(spec.get(setting) for setting in by_place):
        return lambda pair: Separation.JOINED

    @cache
    def neighbours() -> tuple[set[str], set[str]]:
        vocabulary = backend.get_vocab(with_added_tokens=False)
        return {token for token in vocabulary if len(token) == 1}, _neighbours(vocabulary)

    def judge(pair: str) -> Separation:
        single, joined = neighbours()
        # A character that is no token becomes bytes, or an unknown token that may fuse with the next one.
        is_apart = pair[0] in single and pair[1] in single and pair not in joined
        return Separation.APART if is_apart else Separation.JOINED

    return judge
