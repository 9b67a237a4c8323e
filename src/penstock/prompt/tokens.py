"""Exact incremental encoding and decoding: a streamed text has the ids of the whole text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from penstock.errors import InvalidModelFile, InvalidPrompt, UnsupportedModel, brief, first_line
from penstock.prompt.cuts import Cuts, Uncuttable, describe, flat
from penstock.prompt.detokenizer import Detokenizer, decodes_by_token

# What of a model and of an added token decides where a text may be cut.
MODEL_SETTINGS = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
ADDED = ("content", "special", "normalized", "lstrip", "rstrip")
_BLOCK_CHARACTERS = 16_384  # a longer piece is taken in blocks, so that memory does not follow its length
MOST_UNCUT = 16_000_000  # characters that are encoded in one piece; they take gigabytes and half a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Whether texts are encoded as they arrive, and the proof or the obstacle in one phrase."""

    cuttable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Affixes:
    """The special ids that go around every text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """Takes over a backend tokenizer, turns truncation and padding off, and classifies it once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        spec = _without_vocabulary(backend)
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = {token["content"]: token["id"] for token in spec["added_tokens"] if token["special"]}
        self._decodes_by_token = decodes_by_token(spec["decoder"])
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.normalizes = spec["normalizer"] is not None  # then a text may have more tokens than bytes
        self._cuts, self._affixes, self.streaming = self._classify(spec)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidPrompt(_not_text(text)) from error
        except BaseException as error:  # the library raises bare Exception, and panics with what is none
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                raise
            raise InvalidModelFile(f"The tokenizer cannot encode this text ({first_line(error)}).") from error

    def stream(self, pieces: Iterable[str], *, add_special_tokens: bool) -> Iterator[list[int]]:
        """Ids as the text arrives; joined, they are those of `encode` on the joined pieces."""
        if self._cuts is None:
            text = ""
            for block in _blocks(pieces):
                text += block
                _require_short(len(text))
            yield self.encode(text, add_special_tokens=add_special_tokens)
            return
        if add_special_tokens and self._affixes.prefix:
            yield list(self._affixes.prefix)
        yield from filter(None, self._stream_body(self._cuts, pieces))
        if add_special_tokens and self._affixes.suffix:
            yield list(self._affixes.suffix)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as it reads within a text; empty for an id that the vocabulary does not have."""
        if self._backend.id_to_token(token_id) is None:
            return ""
        anchor = self.encode("a", add_special_tokens=False)
        before = self.decode(anchor, skip_special_tokens=False)
        return self.decode([*anchor, token_id], skip_special_tokens=False)[len(before) :]

    def detokenizer(self, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """`shown`: special tokens that are not skipped."""
        hidden = set(self.special_tokens.values()).difference(shown) if skip_special_tokens else set[int]()

        def token(token_id: int) -> str | None:
            return None if token_id in hidden else self._backend.id_to_token(token_id)

        return Detokenizer(
            decode=lambda ids: self.decode(ids, skip_special_tokens=False),  # none that is skipped is among them
            token=token,
            by_token=self._decodes_by_token,
        )

    def to_json(self) -> str:
        """Writes the tokenizer as a `tokenizer.json` holds it."""
        return self._backend.to_str()

    def _classify(self, spec: dict[str, Any]) -> tuple[Cuts | None, Affixes, Streaming]:
        try:
            affixes = self._affixes_of(spec["post_processor"])
            cuts = Cuts(spec, self._backend)
            places = describe(cuts)
            if places is None:
                raise Uncuttable("no two neighbours in ordinary text are provably apart")
        except Uncuttable as error:
            return None, Affixes(), Streaming(cuttable=False, reason=f"encoded whole: {error}")
        return cuts, affixes, Streaming(cuttable=True, reason=f"{_pipeline(spec)}: {places}")

    def _affixes_of(self, post_processor: dict[str, Any] | None) -> Affixes:
        affixes = _affixes(post_processor)
        for text in ("", "a", "a b"):
            body = self.encode(text, add_special_tokens=False)
            if [*affixes.prefix, *body, *affixes.suffix] != self.encode(text, add_special_tokens=True):
                raise Uncuttable("the post-processor does more than add ids in front and behind")
        return affixes

    def _stream_body(self, cuts: Cuts, pieces: Iterable[str]) -> Iterator[list[int]]:
        before, text, searched = "", "", 0
        for block in _blocks(pieces):
            text += block
            _require_short(len(text))
            cut = cuts.last_in(text, searched)
            if cut is None:
                searched = max(len(text) - 2, 0)
                continue
            yield self._encode_after(before, text[:cut])
            before, text, searched = text[cut - 1], text[cut:], 0
        yield self._encode_after(before, text)

    def _encode_after(self, before: str, text: str) -> list[int]:
        """The ids of the text that follows a cut after the character `before` (none at the very start)."""
        if not before:
            return self.encode(text, add_special_tokens=False)
        known = self.encode(before, add_special_tokens=False)
        ids = self.encode(before + text, add_special_tokens=False)
        assert ids[: len(known)] == known, f"the cut after {before!r} changed its ids"
        return ids[len(known) :]


def _without_vocabulary(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The backend's JSON but for its vocabulary, which as Python objects can take more memory than a small model."""
    shell = tokenizers.Tokenizer(tokenizers.models.BPE())
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (component := getattr(backend, part)) is not None:
            setattr(shell, part, component)
    try:
        spec = json.loads(shell.to_str())
    except Exception as error:  # the binding raises a bare Exception
        raise UnsupportedModel(
            f"The tokenizer cannot be written as JSON ({error}), because part of it is Python code; "
            "use a model with a tokenizer.json."
        ) from error
    settings = {name: getattr(backend.model, name, None) for name in MODEL_SETTINGS}
    added = backend.get_added_tokens_decoder().items()
    return spec | {
        "model": {"type": type(backend.model).__name__, **settings},
        "added_tokens": [{"id": id_, **{name: getattr(token, name) for name in ADDED}} for id_, token in added],
    }


def _blocks(pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        if not isinstance(piece, str):
            raise InvalidPrompt(_not_text(piece))
        for start in range(0, len(piece), _BLOCK_CHARACTERS):
            yield piece[start : start + _BLOCK_CHARACTERS]


def _require_short(num_characters: int) -> None:
    """Refuses what must be encoded in one piece before it fills the memory."""
    if num_characters > MOST_UNCUT:
        raise InvalidPrompt(
            f"The text has more than {MOST_UNCUT:,} characters in a row between which it cannot be cut into tokens. "
            "Shorten them, or break their line."
        )


def _not_text(value: object) -> str:
    if not isinstance(value, str):
        return f"The prompt is a {type(value).__name__}; it must be text."
    position = next(i for i, character in enumerate(value) if "\ud800" <= character <= "\udfff")
    return (
        f"The prompt has half a surrogate pair, U+{ord(value[position]):04X}, at character {position}; "
        "decode its source as UTF-8."
    )


def _affixes(spec: dict[str, Any] | None) -> Affixes:
    kind = spec["type"] if spec else None
    if spec is None or kind == "ByteLevel":
        return Affixes()
    if kind in ("BertProcessing", "RobertaProcessing"):
        return Affixes(prefix=(spec["cls"][1],), suffix=(spec["sep"][1],))
    if kind == "TemplateProcessing":
        return _template_affixes(spec)
    if kind == "Sequence":
        inner = [_affixes(part) for part in spec["processors"]]
        prefix = tuple(i for affixes in reversed(inner) for i in affixes.prefix)
        return Affixes(prefix=prefix, suffix=tuple(i for affixes in inner for i in affixes.suffix))
    raise Uncuttable(f"the {kind} post-processor is not known to only add ids in front and behind")


def _template_affixes(spec: dict[str, Any]) -> Affixes:
    bodies = [i for i, part in enumerate(spec["single"]) if "Sequence" in part]
    if len(bodies) != 1:
        raise Uncuttable(f"the post-processor's template holds the text {len(bodies)} times")

    def ids(parts: list[dict[str, Any]]) -> tuple[int, ...]:
        names = [part["SpecialToken"]["id"] for part in parts]
        if lacking := [name for name in names if name not in spec["special_tokens"]]:
            raise Uncuttable(f"the post-processor's template names {brief(lacking[0])}, which it does not have")
        return tuple(i for name in names for i in spec["special_tokens"][name]["ids"])

    return Affixes(prefix=ids(spec["single"][: bodies[0]]), suffix=ids(spec["single"][bodies[0] + 1 :]))


def _pipeline(spec: dict[str, Any]) -> str:
    names = " and ".join(part["type"] for part in flat(spec["pre_tokenizer"], "pretokenizers"))
    return f"{spec['model']['type']} behind {names}" if names else f"{spec['model']['type']} without pre-tokenizer"
