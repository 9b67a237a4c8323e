"""Tokenizers as they come with a model: a folder's tokenizer.json, or rebuilt from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import InvalidModelFile, UnsupportedModel, first_line

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
SLOW_TOKENIZER_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
SLOW_TOKENIZER_FILES += ("vocab.json", "vocab.txt", "tekken.json")
MAX_TOKEN_ID = 1 << 31
MAX_SETTINGS_BYTES, MAX_TOKENIZER_BYTES = 16 << 20, 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """`backend` adds what the tokenizer itself adds (such as a BOS token) in its post-processor."""

    backend: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]  # those of SPECIAL_NAMES that the model has
    eos_ids: frozenset[int]


# --- folders ------------------------------------------------------------------------------------------------


def tokenizer_from_folder(
    folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> TokenizerParts:
    settings = _optional_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
        _add_declared_tokens(folder, backend, settings.get("added_tokens_decoder"))
    else:
        backend = _convert_slow_tokenizer(folder)
    backend.no_truncation()  # a saved setting would cut prompts silently
    backend.no_padding()
    special_tokens = _special_tokens(_optional_json(folder / "special_tokens_map.json") | settings)
    eos_ids = _token_ids(generation_config.get("eos_token_id")) | _token_ids(config.get("eos_token_id"))
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        eos_ids |= _token_ids(text_config.get("eos_token_id"))
    eos_id = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return TokenizerParts(
        backend=backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=special_tokens,
        eos_ids=eos_ids | ({eos_id} if eos_id is not None else set()),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    """{} when the file is not there; a file that is there has to be a JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_bounded_bytes(path, MAX_SETTINGS_BYTES))
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path} cannot be read as JSON ({first_line(error)}); download it again.") from error
    if not isinstance(content, dict):
        raise InvalidModelFile(f"{path} holds a {type(content).__name__}, not a JSON object; download it again.")
    return content


def _bounded_bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InvalidModelFile(f"{path} has more than {limit:,} bytes, the limit; download it again.")
    return content


def _read_backend(path: Path) -> Tokenizer:
    try:
        backend = Tokenizer.from_buffer(_bounded_bytes(path, MAX_TOKENIZER_BYTES))
        backend.encode("a")  # some name a token that they do not have
        return backend
    except BaseException as error:  # the library raises bare Exception, and panics with what is none
        if isinstance(error, (InvalidModelFile, KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        raise InvalidModelFile(f"{path} is not a usable tokenizer ({first_line(error)}); download it again.") from error


def _add_declared_tokens(folder: Path, backend: Tokenizer, declared: object) -> None:
    """Tokens that only tokenizer_config.json calls special must not be cut into pieces either."""
    if not isinstance(declared, Mapping):
        return
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = [(int(number), entry) for number, entry in declared.items() if str(number).isdecimal()]
    for token_id, entry in sorted(entries, key=lambda pair: pair[0]):
        content = _token_text(entry)
        if content is None or content in known or not isinstance(entry, Mapping):
            continue
        flags = {
            flag: bool(entry.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        token = AddedToken(content, **flags)
        _ = backend.add_special_tokens([token]) if flags["special"] else backend.add_tokens([token])
        if backend.token_to_id(content) != token_id:
            raise InvalidModelFile(
                f"{folder}: tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json leads "
                f"to {backend.token_to_id(content)}; download both files again."
            )


def _convert_slow_tokenizer(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in SLOW_TOKENIZER_FILES):
        raise InvalidModelFile(
            f"{folder} has no tokenizer.json and no other tokenizer file; put the model's tokenizer files "
            "beside its config.json."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a conversion trips over, the way out is the same
        raise InvalidModelFile(
            f"{folder} has no tokenizer.json and its tokenizer could not be converted "
            f"({first_line(error, None)}); add a tokenizer.json."
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModel(
            f"{folder} has only a {type(tokenizer).__name__}, which has no fast form; add a tokenizer.json."
        )
    return backend


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return _bounded_bytes(path, MAX_SETTINGS_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidModelFile(f"{path} cannot be read ({first_line(error)}); download it again.") from error
    stored = settings.get("chat_template")
    if stored is None:
        stored = _optional_json(folder / "chat_template.json").get("chat_template")
    return _default_template(stored)


def _default_template(stored: object) -> str | None:
    """The template itself, or the one called `default` among named ones."""
    if isinstance(stored, str):
        return stored
    for entry in stored if isinstance(stored, list) else []:
        if isinstance(entry, Mapping) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
            return entry["template"]
    return None


def _token_text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _token_text(settings.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _token_ids(value: object) -> frozenset[int]:
    """Zero, one or several ids, as configs write them."""
    several = value if isinstance(value, list) else [value]
    return frozenset(item for item in several if type(item) is int and 0 <= item < MAX_TOKEN_ID)


# --- GGUF ---------------------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens swallow the blanks after them
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words_and_digits(num_digits: str, marks: str = "") -> str:
    """`marks`: a class of signs that are part of words, such as vowels of Indic scripts."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+"
    return rf"{_CONTRACTIONS}|{words}|\p{{N}}{num_digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"


def _cased_words_and_digits(num_digits: str, ending: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|\p{{N}}{num_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteLevel:
    """How a byte-level vocabulary was made to see text; `tokenizer.ggml.pre` names it."""

    split: str | None = None  # None: GPT-2's own expression
    splits_digits: bool = False
    normalizes_nfc: bool = False
    ignores_merges: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # unless the file says

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _ByteLevel()
_GPT2_NFC = _ByteLevel(normalizes_nfc=True)
_GPT2_DIGITS = _ByteLevel(splits_digits=True)
_LLAMA3 = _ByteLevel(split=_words_and_digits("{1,3}"), ignores_merges=True, adds_bos=True)
BYTE_LEVEL_KINDS: Mapping[str, _ByteLevel] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2_NFC,
    "mpt": _GPT2_NFC,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "smaug-bpe": _ByteLevel(split=_words_and_digits("{1,3}"), ignores_merges=True),
    "dbrx": _ByteLevel(split=_words_and_digits("{1,3}")),
    "qwen2": _ByteLevel(split=_words_and_digits(""), normalizes_nfc=True),
    "qwen35": _ByteLevel(split=_words_and_digits("", r"\p{M}"), normalizes_nfc=True),
    "command-r": _ByteLevel(splits_digits=True, normalizes_nfc=True),
    "gpt-4o": _ByteLevel(split=_cased_words_and_digits("{1,3}", f"{_CONTRACTIONS}?")),
    "tekken": _ByteLevel(split=_cased_words_and_digits("", ""), ignores_merges=True, adds_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Rebuilds the tokenizer that the model was trained with, or refuses: nearly right is wrong."""
    kind = metadata.get("tokenizer.ggml.model")
    builders: dict[str, Callable[[_Vocabulary], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _sentencepiece,
    }
    if not isinstance(kind, str) or kind not in builders:
        raise UnsupportedModel(
            f"The GGUF file's tokenizer is of kind {kind!r}; {', '.join(builders)} are rebuilt "
            "from GGUF, so use the model's safetensors folder instead."
        )
    vocabulary = _Vocabulary(metadata)
    backend = builders[kind](vocabulary)
    _mark_added_tokens(backend, vocabulary)
    template = metadata.get("tokenizer.chat_template")
    chat_template = template if isinstance(template, str) else None
    ids = {
        "bos_token": vocabulary.token_id("bos_token_id"),
        "eos_token": vocabulary.token_id("eos_token_id"),
        "unk_token": vocabulary.token_id("unknown_token_id"),
        "pad_token": vocabulary.token_id("padding_token_id"),
    }
    return TokenizerParts(
        backend=backend,
        chat_template=chat_template,
        special_tokens={name: vocabulary.tokens[id_] for name, id_ in ids.items() if id_ is not None},
        eos_ids=_gguf_eos_ids(vocabulary, chat_template),
    )


class _Vocabulary:
    """A GGUF file's token table, with its lists checked once."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._list("tokens", str)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise _bad_tokenizer(f"{len(self.tokens) - len(self.ids)} of its {len(self.tokens)} tokens are repeated")
        types: list[int] = self._list("token_type", int) if self.raw("token_type") is not None else []
        self.types = types or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise _bad_tokenizer(f"it has {len(self.types)} token types for {len(self.tokens)} tokens")

    def raw(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self.raw(key)
        if not isinstance(values, list) or not values or not all(type(value) is kind for value in values):
            raise _bad_tokenizer(f"tokenizer.ggml.{key} is missing or not a list of {kind.__name__}")
        return values

    @property
    def is_phi3(self) -> bool:
        return self._metadata.get("general.architecture") == "phi3" and self.raw("model") == "llama"

    @property
    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if bad := next((pair for pair in pairs if len(pair) != 2), None):
            raise _bad_tokenizer(f"{bad!r} is no merge of two tokens")
        return [(left, right) for left, right in pairs]

    @property
    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise _bad_tokenizer(f"it has {len(scores)} scores for {len(self.tokens)} tokens")
        return scores

    def token_id(self, key: str) -> int | None:
        value = self.raw(key)
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise _bad_tokenizer(f"tokenizer.ggml.{key} is {str(value)[:60]!r}, outside its {len(self.tokens)} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        return default if value is None else bool(value)


def _bad_tokenizer(what: str) -> InvalidModelFile:
    return InvalidModelFile(f"The GGUF file's tokenizer is not usable: {what}; convert the model again.")


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise _bad_tokenizer(str(error)) from error


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    name = vocabulary.raw("pre")
    if not isinstance(name, str) or name not in BYTE_LEVEL_KINDS:
        raise UnsupportedModel(
            f"The GGUF file's pre-tokenizer is {name!r}; known are {', '.join(BYTE_LEVEL_KINDS)}. "
            "Use the model's safetensors folder, which has a tokenizer.json."
        )
    kind = BYTE_LEVEL_KINDS[name]
    backend = _bpe(vocabulary, vocabulary.merges, ignore_merges=kind.ignores_merges)
    if kind.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _surround(backend, vocabulary, adds_bos=kind.adds_bos)
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE joins the pair whose result scores best; falling scores order merges that are not stored."""
    merges = vocabulary.merges if vocabulary.raw("model") == "gemma4" else _merges_from_scores(vocabulary)
    unknown = vocabulary.token_id("unknown_token_id")
    backend = _bpe(
        vocabulary,
        merges,
        byte_fallback=BYTE in vocabulary.types,
        fuse_unk=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    adds_space = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if adds_space else spaces
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    _surround(backend, vocabulary, adds_bos=True)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    pieces = {
        token: (-score, index)
        for index, (token, score, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        )
        if kind == NORMAL
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(pieces, key=pieces.__getitem__):
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in pieces]
        merges += [(token[:cut], token[cut:]) for cut in cuts if token[cut:] in pieces]
    return merges


def _surround(backend: Tokenizer, vocabulary: _Vocabulary, *, adds_bos: bool) -> None:
    """Puts BOS and EOS around every text as the file says; as labels, since a token may hold any sign."""
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    labels: dict[str, int] = {}
    if vocabulary.flag("add_bos_token", adds_bos) and bos is not None:
        labels["BOS"] = bos
    if vocabulary.flag("add_eos_token", False) and eos is not None:
        labels["EOS"] = eos
    if not labels:
        return
    first, last = [label for label in labels if label == "BOS"], [label for label in labels if label == "EOS"]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", "$B", *last],
        special_tokens=[
            {"id": label, "ids": [index], "tokens": [vocabulary.tokens[index]]} for label, index in labels.items()
        ],
    )


def _mark_added_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control and user-defined tokens are matched whole in the text, before any splitting or normalizing."""
    special, plain = [], []
    is_phi3 = vocabulary.is_phi3
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        rstrip = is_phi3 and token not in PHI3_UNSTRIPPED
        if token and kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif token and kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False, rstrip=rstrip))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _gguf_eos_ids(vocabulary: _Vocabulary, chat_template: str | None) -> frozenset[int]:
    """What the file names as an end, and the end-of-turn token that its template writes (often not named)."""
    named = {vocabulary.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
    written = {
        vocabulary.ids[token]
        for token in END_OF_TURN_TOKENS
        if token in vocabulary.ids
        and token in (chat_template or "")
        and vocabulary.types[vocabulary.ids[token]] in (CONTROL, USER_DEFINED)
    }
    return frozenset({index for index in named if index is not None} | written)
