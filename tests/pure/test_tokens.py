"""Streamed ids are those of the whole text, for every kind of tokenizer, or the tokenizer is not streamed."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

sys.path.insert(0, str(Path(__file__).parents[1]))

import tokenizers_for_tests as kinds

from penstock.errors import InvalidPrompt, UnsupportedModel
from penstock.prompt import tokens
from penstock.prompt.cuts import Cuts
from penstock.prompt.pattern import Pattern, UnreadablePattern
from penstock.prompt.tokens import ADDED, MODEL_SETTINGS, Tokenizer, _without_vocabulary

ALL_KINDS = list(kinds.KINDS)
EDGES = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n",
    "a",
    "</s>",
    "<|im_end|><|im_end|>",
    "▁",
    " ▁ ",
    "\u0301",
    "e\u0301",
    "👩‍👩‍👧‍👦",
    "\U0010fffd",
]


# Each was an answer to a weaker rule: a space that a normalizer adds and a token strips, a mark after a space.
TRAPS = ["我 dog 我我  <mask> 的 x", "a \u0301b =\u0338 c", "cat  gate \n the", "x\r\ny \u00a0 z", "The  FLOW of  the"]


def streamed(tokenizer: Tokenizer, pieces: list[str], *, add_special_tokens: bool = True) -> list[int]:
    return kinds.joined(tokenizer.stream(pieces, add_special_tokens=add_special_tokens))


def check_random_texts(kind: str, num_texts: int) -> None:
    """An equal share of texts for each set of added tokens."""
    for number, name in enumerate(kinds.ADDED):
        backend = kinds.with_added(kinds.trained(kind), name)
        tokenizer = Tokenizer(backend)
        assert tokenizer.streaming.cuttable, tokenizer.streaming.reason
        rng = random.Random(f"{kind} {name}")
        for _ in range(len(range(number, num_texts, len(kinds.ADDED)))):
            text = kinds.random_text(rng, kinds.ADDED[name])
            special = rng.random() < 0.5
            pieces = kinds.pieces_of(rng, text)
            whole = backend.encode(text, add_special_tokens=special).ids
            assert streamed(tokenizer, pieces, add_special_tokens=special) == whole, (name, pieces)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_streamed_ids_are_those_of_the_whole_text(kind):
    check_random_texts(kind, 300)


@pytest.mark.evidence
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_streamed_ids_are_those_of_the_whole_text_ten_thousand_times(kind):
    check_random_texts(kind, 10_000)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_edges_are_exact_in_pieces_of_every_size(kind):
    tokenizer = Tokenizer(kinds.with_added(kinds.trained(kind), "special"))
    text = "The  cat's 1234 dogs,\r\n\r\n我们 e\u0301migré<|im_start|>user\n 👩‍👩‍👧‍👦\tdon't  "
    for case, special in itertools.product([*EDGES, text], (True, False)):
        whole = tokenizer.encode(case, add_special_tokens=special)
        for size in range(1, len(case) + 2):
            pieces = [case[at : at + size] for at in range(0, len(case), size)]
            assert streamed(tokenizer, pieces, add_special_tokens=special) == whole, (case, size)


def check_every_cut(backend: tokenizers.Tokenizer, rng: random.Random, name: str, num_texts: int) -> int:
    """Each cut that is accepted, not only the ones that a stream happens to choose."""
    tokenizer = Tokenizer(backend)
    cuts = tokenizer._cuts
    assert cuts is not None, tokenizer.streaming.reason
    num_cuts = 0
    for text in [*TRAPS, *(kinds.random_text(rng, kinds.ADDED[name])[:80] for _ in range(num_texts))]:
        whole = backend.encode(text, add_special_tokens=False).ids
        for at in range(1, len(text) - 1):
            if cuts.between(*text[at - 1 : at + 2]):
                num_cuts += 1
                left = tokenizer.encode(text[:at], add_special_tokens=False)
                assert left + tokenizer._encode_after(text[at - 1], text[at:]) == whole, (text, at)
    return num_cuts


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_cut_is_exact(kind):
    rng = random.Random(kind)
    backends = {name: kinds.with_added(kinds.trained(kind), name) for name in kinds.ADDED}
    assert sum(check_every_cut(backend, rng, name, 30) for name, backend in backends.items()) > 30


@pytest.mark.evidence
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_cut_is_exact_many_times(kind):
    rng = random.Random(kind)
    backends = {name: kinds.with_added(kinds.trained(kind), name) for name in kinds.ADDED}
    assert sum(check_every_cut(backend, rng, name, 1_000) for name, backend in backends.items()) > 1_000


def endless_text():
    rng = random.Random(5)
    while True:
        yield rng.choice(["the ", "cat's ", "123 ", "river, ", "我们 ", "\n", "Привет ", "foo(bar) "])


# The tokens of `joined_words` hold whatever stands side by side in this text, so that nothing is apart there.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "joined_words"])
def test_ids_of_an_endless_text_come_in_small_steps(kind):
    tokenizer = Tokenizer(kinds.with_added(kinds.trained(kind), "special"))
    num_read = 0

    def reading():
        nonlocal num_read
        for piece in endless_text():
            num_read += len(piece)
            yield piece

    num_read_before, longest_wait = 0, 0
    for _ in itertools.islice(tokenizer.stream(reading(), add_special_tokens=True), 500):
        longest_wait = max(longest_wait, num_read - num_read_before)
        num_read_before = num_read
    assert longest_wait < 200


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "smollm2"])
@pytest.mark.parametrize(
    ("alphabet", "limit"),
    [("我们的世界你好，。", 100), ("abcXYZ0189+/", 100), ("0123456789,\n", 100), ("fx(){};=\n", 100)],
    ids=["ideographs", "base64", "numbers", "code"],
)
def test_text_without_spaces_is_cut_too(kind, alphabet, limit):
    tokenizer = Tokenizer(kinds.trained(kind))
    rng = random.Random(3)
    text = "".join(rng.choices(alphabet, k=3_000))
    lists = list(tokenizer.stream(list(text), add_special_tokens=False))
    assert kinds.joined(lists) == tokenizer.encode(text, add_special_tokens=False)
    assert max(map(len, lists)) < limit


def test_one_long_piece_is_taken_in_blocks():
    tokenizer = Tokenizer(kinds.trained("gpt2"))
    text = "".join(itertools.islice(endless_text(), 20_000))
    lists = list(tokenizer.stream([text], add_special_tokens=False))
    assert kinds.joined(lists) == tokenizer.encode(text, add_special_tokens=False)
    assert max(map(len, lists)) < 20_000


def with_parts(kind: str = "gpt2", **parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(kinds.trained(kind).to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def then_bytes(*stages) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def repeated_text() -> tokenizers.Tokenizer:
    return with_parts(post_processor=processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[]))


def words_that_end_in_every_letter() -> tokenizers.Tokenizer:
    backend = with_parts()
    backend.add_tokens([AddedToken(letter * 2) for letter in "abcdefghijklmnopqrstuvwxyz我的水"])
    return backend


def whole_texts_looked_up() -> tokenizers.Tokenizer:
    backend = with_parts("gemma")
    backend.model.ignore_merges = True
    return backend


def dropout() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={"a": 0, " ": 1}, merges=[], dropout=1.0))


UNCUTTABLE = {
    "lookbehind": lambda: with_parts(pre_tokenizer=then_bytes(kinds.split(r"(?<=a)b|\w+|\s+"))),
    "backreference": lambda: with_parts(pre_tokenizer=then_bytes(kinds.split(r"(\w)\1|\w+|\s+"))),
    "word border": lambda: with_parts(pre_tokenizer=then_bytes(kinds.split(r"\b"))),
    "one piece": lambda: with_parts(pre_tokenizer=then_bytes()),
    "everything matches": lambda: with_parts(pre_tokenizer=then_bytes(kinds.split(r"(?m:.)+"))),
    "fixed length": lambda: with_parts(pre_tokenizer=pre_tokenizers.FixedLength(length=3)),
    "scripts": lambda: with_parts(pre_tokenizer=pre_tokenizers.UnicodeScripts()),
    "replace from the start": lambda: with_parts(normalizer=normalizers.Replace(Regex("^a"), "b")),
    "replace across": lambda: with_parts(normalizer=normalizers.Replace(Regex(r"[a-z][ ,0-9]"), "b")),
    "byte normalizer": lambda: with_parts(normalizer=normalizers.ByteLevel()),
    "text twice": repeated_text,
    "added letters": words_that_end_in_every_letter,
    "whole texts looked up": whole_texts_looked_up,
    "dropout": dropout,
}


@pytest.mark.parametrize("is_cuttable", [True, False])
def test_what_can_be_cut_nowhere_is_refused_before_it_fills_the_memory(is_cuttable, monkeypatch):
    monkeypatch.setattr(tokens, "MOST_UNCUT", 200_000)
    tokenizer = Tokenizer(with_parts() if is_cuttable else whole_texts_looked_up())
    assert tokenizer.streaming.cuttable == is_cuttable
    pieces = itertools.repeat("a" * 10_000)
    with pytest.raises(InvalidPrompt, match="more than 200,000 characters in a row"):
        streamed(tokenizer, pieces)


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_what_cannot_be_proven_is_encoded_whole(name):
    backend = UNCUTTABLE[name]()
    tokenizer = Tokenizer(backend)
    if name != "added letters":
        assert not tokenizer.streaming.cuttable
        assert tokenizer.streaming.reason.startswith("encoded whole: ")
    text = "ab abb a1 the cat's aa, 我们 river\n\n"
    lists = list(tokenizer.stream(list(text), add_special_tokens=True))
    assert kinds.joined(lists) == backend.encode(text).ids
    assert tokenizer.streaming.cuttable or len(lists) == 1


@pytest.mark.parametrize("behavior", ["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"])
@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("pattern", [" ", r"\s+", r"[a-z]+", r"\w+|[^\w\s]+", r"[ ,]", r"\p{L}+(?!\d)|."])
def test_every_behavior_of_a_split_is_exact(behavior, invert, pattern):
    """Cuttable or not; in a BPE without whole-word merges both roads of the proof are taken."""
    stage = kinds.split(pattern, behavior, invert)
    for backend in (with_parts(pre_tokenizer=then_bytes(stage)), with_parts("gemma", pre_tokenizer=stage)):
        tokenizer = Tokenizer(backend)
        rng = random.Random(9)
        for _ in range(25):
            text = kinds.random_text(rng, [])
            assert streamed(tokenizer, kinds.pieces_of(rng, text)) == backend.encode(text).ids


@pytest.mark.parametrize(
    "stage",
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.CharDelimiterSplit("e"),
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.Punctuation("merged_with_next"),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Metaspace(prepend_scheme="never"),
    ],
    ids=lambda stage: type(stage).__name__,
)
def test_other_pre_tokenizers_are_exact(stage):
    backend = with_parts(pre_tokenizer=then_bytes(stage))
    tokenizer = Tokenizer(backend)
    assert tokenizer.streaming.cuttable
    rng = random.Random(10)
    for _ in range(60):
        text = kinds.random_text(rng, [])
        assert streamed(tokenizer, kinds.pieces_of(rng, text)) == backend.encode(text).ids


NORMALIZERS = {
    "nfd": normalizers.NFD(),
    "nfkc": normalizers.NFKC(),
    "nfkd and accents": normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]),
    "nmt": normalizers.Nmt(),
    "lowercase": normalizers.Lowercase(),
    "bert": normalizers.BertNormalizer(strip_accents=True),
    "strip": normalizers.Strip(),
    "quotes": normalizers.Sequence([normalizers.Replace("''", '"'), normalizers.Replace("``", '"')]),
    "lines": normalizers.Replace(Regex("\n"), " "),
    "spaces": normalizers.Replace(Regex(r"\s+"), " "),
    "removed": normalizers.Replace(Regex("[0-9]+"), ""),
    "charsmap": normalizers.Precompiled(kinds.charsmap()),
    "bert and strip": normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Strip()]),
}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("added", ["normalized", "lstrip_normalized"])
@pytest.mark.parametrize("kind", ["gpt2", "unigram"])
def test_normalizers_are_exact(name, added, kind):
    backend = kinds.with_added(with_parts(kind, normalizer=NORMALIZERS[name]), added)
    assert check_every_cut(backend, random.Random(name), added, 80) > 5


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    atoms = ["a", "b", " ", "1", r"\s", r"\S", r"\w", r"\p{L}", r"\p{N}", "[^a ]", "[ab]", ".", r"[\r\n]", "(?i:a)"]
    parts = []
    for _ in range(rng.randint(1, 3)):
        if depth and rng.random() < 0.35:
            opening = rng.choice(["(?:", "(", "(?:", "(?!", "(?=", "(?>"])
            parts.append(opening + random_pattern(rng, depth - 1) + ")")
            if opening in ("(?!", "(?="):
                continue
        else:
            parts.append(rng.choice(atoms))
        parts.append(rng.choice(["", "", "", "?", "*", "+", "+?", "++", "?+", "{2}", "{1,3}", "{2,}", "{0,2}"]))
        if rng.random() < 0.05:
            parts.append("$")
    return "".join(parts) + ("|" + random_pattern(rng, depth - 1) if depth and rng.random() < 0.6 else "")


def pieces_by(stage: Any, text: str) -> list[str]:
    return [piece for piece, _ in stage.pre_tokenize_str(text)]


def check_random_patterns(num_patterns: int) -> int:
    """What the analysis says about two neighbours, against what the engine does with texts around them."""
    rng = random.Random(21)
    num_checked = 0
    for _ in range(num_patterns):
        source = random_pattern(rng)
        try:
            pattern = Pattern(source)
            stage = kinds.split(source)
        except Exception:  # unread by the analysis, or by the engine, whose binding raises a bare Exception
            continue
        for _ in range(30):
            text = "".join(rng.choices("aAb1 \n,", k=rng.randint(2, 9)))
            at = rng.randrange(1, len(text))
            left, right = text[at - 1], text[at]
            certain = pattern.always_matches(left) or pattern.always_matches(right)
            if certain and not pattern.may_join(left, right):
                left_pieces, right_pieces = pieces_by(stage, text[:at]), pieces_by(stage, text[at:])
                assert pieces_by(stage, text) == left_pieces + right_pieces, (source, text, at)
                num_checked += 1
    return num_checked


def test_what_is_said_about_a_pattern_holds_for_random_patterns():
    assert check_random_patterns(400) > 500


@pytest.mark.evidence
def test_what_is_said_about_a_pattern_holds_for_many_random_patterns():
    assert check_random_patterns(20_000) > 30_000


@pytest.mark.parametrize(
    "source", ["a{1000}", "(a", "a)", "[a", "a**", r"\1", r"\b", "^a", "(?<x>a)", "a?", "(?i:ß)", "(?-i:a)", r"\X", ""]
)
def test_a_pattern_that_is_not_understood_is_refused(source):
    with pytest.raises(UnreadablePattern):
        Pattern(source)


def test_wrong_cuts_would_be_noticed(monkeypatch):
    monkeypatch.setattr(Cuts, "_are_apart", lambda cuts, pair: not pair[1].isalpha())
    for kind in ("gpt2", "llama3", "unigram"):
        with pytest.raises(AssertionError):
            check_random_texts(kind, 300)


def test_truncation_and_padding_are_off():
    backend = with_parts()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode("the cat and the river of the dog", add_special_tokens=True)) > 2
    assert len(tokenizer.encode("the", add_special_tokens=True)) < 9


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "unigram"])
def test_a_tokenizer_is_classified_without_its_vocabulary(kind):
    backend = kinds.with_added(kinds.trained(kind), "special")
    written, described = json.loads(backend.to_str()), _without_vocabulary(backend)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert described[part] == written[part]
    assert described["model"] == {name: written["model"].get(name) for name in ("type", *MODEL_SETTINGS)}
    assert described["added_tokens"] == [
        {name: token[name] for name in ("id", *ADDED)} for token in written["added_tokens"]
    ]


def test_specials_are_text_if_the_original_says_so():
    backend = kinds.with_added(kinds.trained("gpt2"), "special")
    backend.encode_special_tokens = True
    tokenizer = Tokenizer(backend)
    text = "the </s> cat<|im_end|>"
    assert streamed(tokenizer, list(text)) == backend.encode(text).ids
    assert backend.token_to_id("</s>") not in tokenizer.encode(text, add_special_tokens=False)


def test_half_a_surrogate_pair_is_refused_with_its_place():
    tokenizer = Tokenizer(kinds.trained("gpt2"))
    with pytest.raises(InvalidPrompt, match=re.escape("U+D83D, at character 3")):
        tokenizer.encode("abc\ud83d", add_special_tokens=False)
    with pytest.raises(InvalidPrompt, match=re.escape("U+D83D")):
        list(tokenizer.stream(["the cat ", "\ud83d"], add_special_tokens=False))


def test_what_is_not_text_is_refused():
    with pytest.raises(InvalidPrompt, match="is a bytes; it must be text"):
        list(Tokenizer(kinds.trained("gpt2")).stream([b"the cat"], add_special_tokens=False))  # ty: ignore


def test_a_tokenizer_with_python_parts_is_refused():
    class Custom:
        def pre_tokenize(self, pretokenized):
            pass

    with pytest.raises(UnsupportedModel, match=re.escape("tokenizer.json")):
        Tokenizer(with_parts(pre_tokenizer=pre_tokenizers.PreTokenizer.custom(Custom())))


def test_the_vocabulary_is_looked_up():
    backend = kinds.with_added(kinds.trained("llama2"), "special")
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    river = tokenizer.encode("the river", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, river)) == " the river"
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""


def check_detokenizer(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> None:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    parts = [detokenizer.push(token_id) for token_id in ids]
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(parts) + detokenizer.flush() == text
    assert text.startswith("".join(parts))


def check_random_detokenizing(kind: str, num_texts: int) -> None:
    """Ids of texts, and ids that no text has: broken characters, single bytes, added tokens anywhere."""
    tokenizer = Tokenizer(kinds.with_added(kinds.trained(kind), "special"))
    rng = random.Random(kind)
    low = [i for i in range(tokenizer.vocab_size) if i < 300 or i >= tokenizer.vocab_size - 4]
    for _ in range(num_texts):
        ids = tokenizer.encode(kinds.random_text(rng, kinds.ADDED["special"]), add_special_tokens=True)
        for _ in range(rng.choice([0, 0, 2, 10])):
            ids.insert(rng.randint(0, len(ids)), rng.choice([*low, rng.randrange(tokenizer.vocab_size)]))
        check_detokenizer(tokenizer, ids, skip=rng.random() < 0.5)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_detokenizing_one_by_one_is_decoding_together(kind):
    check_random_detokenizing(kind, 100)


@pytest.mark.evidence
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_detokenizing_one_by_one_is_decoding_together_many_times(kind):
    check_random_detokenizing(kind, 5_000)


OTHER_DECODERS = [
    None,
    decoders.BPEDecoder(),
    decoders.CTC(),
    decoders.WordPiece(cleanup=False),
    decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "b")]),
    decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
]


@pytest.mark.parametrize("decoder", OTHER_DECODERS, ids=lambda d: type(d).__name__)
def test_other_decoders_are_exact(decoder):
    backend = with_parts("llama2", decoder=decoder)
    tokenizer = Tokenizer(backend)
    rng = random.Random(4)
    for _ in range(60):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 20))]
        check_detokenizer(tokenizer, ids, skip=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_no_part_of_a_character_is_ever_shown(kind):
    tokenizer = Tokenizer(kinds.trained(kind))
    text = "the 👩‍👩‍👧‍👦 \U0001d538\u2603 世界 👍 end"
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(i) for i in tokenizer.encode(text, add_special_tokens=True)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + detokenizer.flush() == text


def test_a_token_without_text_does_not_count_as_the_start():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"▁a": 0, "": 1, "▁b": 2}, merges=[]))
    backend.decoder = kinds.trained("llama2").decoder
    check_detokenizer(Tokenizer(backend), [0, 1, 2, 1, 1, 0], skip=True)


def test_text_appears_token_by_token():
    tokenizer = Tokenizer(kinds.trained("llama2"))
    ids = tokenizer.encode("the river and the cat", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(i) for i in ids]
    assert "".join(parts) == "the river and the cat"
    assert parts[0] == "the"
    assert detokenizer.flush() == ""
