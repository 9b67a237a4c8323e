"""Tokenizers of every kind that models come with, trained on a small corpus with rich Unicode, and texts for them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

_WORDS = """
    the The of and to in is THE it's don't we'll I'M they've you're he'd cat dog river penstock water gate flow x y
    émigré naïve Ångström Straße ǅ İstanbul ﬁne ſ K e\u0301 a\u0308 o\u0302\u0323 \u1100\u1161
    Καλημέρα κόσμε Привет мир שלום مرحبا नमस्ते สวัสดี 你好 世界 我们 的 こんにちは カタカナ 한국어 안녕
    👍 👩\u200d👩\u200d👧\u200d👦 🇫🇷 🏳\ufe0f\u200d🌈 \U00010400 \U0001d538 \U000200d0
    १२३ ٣٤ Ⅷ ½ 0 7 42 123 2024 1234567 3.14 def foo(bar): return {'a':1} [0] == != -> // /* */ && # $x @y
    http://a.b/c?d=e&f=g aGVsbG8= — “quoted” … 。 ， ！
"""
WORDS = _WORDS.split()
SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\r",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x0b",
    "        ",
]
MARKS = [
    "'",
    "'s",
    "'",
    "’s",
    "\u0301",
    "\u200d",
    "\ufe0f",
    "▁",
    "▁▁",
    "<",
    ">",
    "|",
    "<0x41>",
    "##",
    "\x00",
    "\ufffd",
    "ß",
    "ﬆ",
]

# A name for each set of added tokens, with the ones that it adds.
ADDED: dict[str, list[AddedToken]] = {
    "none": [],
    "special": [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "</s>")],
    "lstrip": [AddedToken(t, lstrip=True, normalized=False) for t in ("<mask>", "dog")],
    "lstrip_normalized": [AddedToken(t, lstrip=True, normalized=True) for t in ("<mask>", "dog")],
    "rstrip": [AddedToken("<sep>", special=True, rstrip=True, normalized=False), AddedToken("gate", rstrip=True)],
    "single_word": [AddedToken("cat", single_word=True, normalized=False), AddedToken("the", single_word=True)],
    "spaces": [AddedToken(t, normalized=False) for t in ("the river", " of ", "\n\n", "x y\n", "water")],
    "normalized": [AddedToken(t, normalized=True) for t in ("The Flow", "émigré", " gate", "e\u0301x", "我们")]
    + [AddedToken("OF THE", normalized=True), AddedToken("WATER", normalized=True, rstrip=True)],
}


def corpus() -> Iterator[str]:
    rng = random.Random(7)
    for _ in range(400):
        yield "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", " ", ", ", ".\n", "\n", ""]) for _ in range(30))


def random_text(rng: random.Random, added: Sequence[AddedToken]) -> str:
    """Words, spaces, marks and added tokens, whole and broken, in a mix that differs from text to text."""
    contents = [token.content for token in added] or ["<|im_start|>"]
    word_share, space_share, token_share = rng.choice([(60, 30, 4), (30, 60, 4), (50, 5, 5), (35, 25, 30), (90, 0, 1)])
    sources = rng.choices("wstmu", (word_share, space_share, token_share, 8, 3), k=rng.randint(0, 24))
    return "".join(_random_part(rng, source, contents) for source in sources)


def _random_part(rng: random.Random, source: str, contents: Sequence[str]) -> str:
    if source == "w":
        return rng.choice(WORDS)
    if source == "s":
        return rng.choice(SPACES)
    if source == "m":
        return rng.choice(MARKS)
    if source == "t":
        token = rng.choice(contents)
        token = rng.choice([token, token, token.lower()])
        start = rng.choice([0, 0, 0, rng.randrange(len(token))])
        broken = token[start : rng.choice([len(token), len(token), rng.randint(start, len(token))])]
        before, after = ("".join(rng.choices(SPACES, k=rng.choice([0, 0, 1, 2]))) for _ in range(2))
        return before + broken + after
    point = rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000)])
    return chr(point)


def pieces_of(rng: random.Random, text: str) -> list[str]:
    """The text in pieces of one size, or of sizes that vary."""
    size = rng.choice([1, 1, 2, 3, 5, 8, 13, 40, 400])
    pieces, at = [], 0
    while at < len(text):
        length = size if rng.random() < 0.8 else rng.randint(0, size)
        pieces.append(text[at : at + length])
        at += length
    return pieces


def with_added(backend: Tokenizer, name: str) -> Tokenizer:
    copy = Tokenizer.from_str(backend.to_str())
    copy.add_tokens(ADDED[name])
    copy.add_special_tokens([token for token in ADDED[name] if token.special])
    return copy


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator(corpus(), trainer)
    return backend


def _byte_level(
    *stages: Any, normalizer: Any = None, add_prefix_space: bool = False, use_regex: bool = False, **options: Any
) -> Tokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    parts: dict[str, Any] = {"pre_tokenizer": pre_tokenizers.Sequence([*stages, last]), "decoder": decoders.ByteLevel()}
    if normalizer is not None:
        parts["normalizer"] = normalizer
    backend = _trained(models.BPE(**options), trainer, **parts)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def gpt2() -> Tokenizer:
    return _byte_level(use_regex=True)


def gpt2_prefix_space() -> Tokenizer:
    return _byte_level(use_regex=True, add_prefix_space=True)


def smollm2() -> Tokenizer:
    return _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True)


def llama3() -> Tokenizer:
    backend = _byte_level(split(LLAMA3_PATTERN), ignore_merges=True)
    backend.add_special_tokens(["<|begin_of_text|>"])
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def qwen() -> Tokenizer:
    return _byte_level(split(QWEN_PATTERN), normalizer=normalizers.NFC())


def o200k() -> Tokenizer:
    return _byte_level(split(O200K_PATTERN, "removed", True))


def possessive() -> Tokenizer:
    return _byte_level(split(POSSESSIVE_PATTERN))


def clip() -> Tokenizer:
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    lower = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    return _byte_level(split(pattern, "removed", True), normalizer=normalizers.Sequence(lower))


def _sentencepiece_decoder() -> Any:
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    return decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])


def _sentencepiece_bpe(**parts: Any) -> Tokenizer:
    """Trained on words, then run without pre-tokenizer, as converted SentencePiece models are."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    seed = _trained(
        models.BPE(unk_token="<unk>"), trainer, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
    )
    spec = json.loads(seed.to_str())["model"]
    # Some characters must fall back to bytes, so that both roads are walked.
    dropped = {"世", "ж", "👍"} & set(spec["vocab"])
    merges = [tuple(m) for m in spec["merges"] if not dropped & set("".join(m))]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(t for t in spec["vocab"] if not dropped & set(t))},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.decoder = _sentencepiece_decoder()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    bos = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=bos)
    return backend


def joined_words() -> Tokenizer:
    """A BPE whose tokens hold several words, so that a space is a cut only after some letters; unknowns fuse."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>"], limit_alphabet=60, max_token_length=9, show_progress=False
    )
    backend = _trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, pre_tokenizer=metaspace)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


def llama2() -> Tokenizer:
    return _sentencepiece_bpe(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    )


def llama2_metaspace() -> Tokenizer:
    return _sentencepiece_bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


def gemma() -> Tokenizer:
    return _sentencepiece_bpe(
        normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")
    )


def _unigram(prepend_scheme: str, **parts: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend = _trained(models.Unigram(), trainer, pre_tokenizer=metaspace, **parts)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    eos = [("</s>", backend.token_to_id("</s>"))]
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A $B </s>", special_tokens=eos)
    return backend


def unigram() -> Tokenizer:
    return _unigram("always")


def t5() -> Tokenizer:
    steps = [normalizers.Precompiled(charsmap()), normalizers.Strip(False, True)]
    steps.append(normalizers.Replace(Regex(" {2,}"), "▁"))
    return _unigram("first", normalizer=normalizers.Sequence(steps))


def charsmap() -> bytes:
    """A small SentencePiece character map: a double array over the bytes of a few characters, then their images."""
    images = {b"\t": b" ", b"\n": b" ", "ﬁ".encode(): b"fi", "½".encode(): b"1/2", "\u3000".encode(): b" "}
    texts, offsets = b"", {}
    for key, image in images.items():
        offsets[key] = len(texts)
        texts += image + b"\0"
    units = [0] * 4096
    prefixes: dict[bytes, int] = {b"": 0}
    next_base = 256
    for prefix in sorted({key[:i] for key in images for i in range(len(key) + 1)}, key=len):
        node = prefixes[prefix]
        children = sorted({key[len(prefix)] for key in images if key.startswith(prefix) and len(key) > len(prefix)})
        base = next_base
        next_base += 256
        is_leaf = prefix in offsets
        label = prefix[-1] if prefix else 0
        units[node] = label | (int(is_leaf) << 8) | ((node ^ base) << 10)
        if is_leaf:
            units[base] = offsets[prefix] | 1 << 31
        for child in children:
            prefixes[prefix + bytes([child])] = base ^ child
    array = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(array)) + array + texts


def bert() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    backend = _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    ends = [(name, backend.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    backend.decoder = decoders.WordPiece()
    return backend


KINDS = {
    make.__name__: make
    for make in (
        gpt2, gpt2_prefix_space, smollm2, llama3, qwen, o200k, possessive, clip,
        llama2, llama2_metaspace, joined_words, gemma, unigram, t5, bert,
    )
}  # fmt: skip


@cache
def trained(kind: str) -> Tokenizer:
    return KINDS[kind]()


def joined(lists: Iterable[list[int]]) -> list[int]:
    return [token_id for ids in lists for token_id in ids]
