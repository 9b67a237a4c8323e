"""Tokenizers loaded from folders and GGUF files cut text exactly as the models' own do."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.models.files import resolve
from penstock.prompt.load import BYTE_LEVEL_KINDS, tokenizer_from_folder, tokenizer_from_gguf

CORPUS = [
    "the quick brown fox jumps over the lazy dog 1234567890",
    "l'été, c'est déjà fini!",
    "x = {1: 'a'}\n\n\tif x:",
]
TEXTS = [
    "",
    " ",
    "  two spaces",
    "Hello, world!",
    "In 2024 there were 1234567 of them; 3.14159",
    "I'm sure they've said it'LL work",
    "été e\u0301te\u0301 naïve Ω ﬁ",
    "日本語のテキスト 한국어 नमस्ते",
    "emoji 👩‍👩‍👧 🏳️‍🌈",
    "line\r\n\r\nbreaks\n \n\t tabs   \n",
    "x=1;y  =  [2,3]//comment",
]


# --- folders ------------------------------------------------------------------------------------------------


def trained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    trained_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": "plain {{ messages }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def set_config(folder, **entries):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_folder_gives_what_transformers_gives(folder):
    parts = tokenizer_from_folder(folder, {}, {})
    transformers = pytest.importorskip("transformers")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "<s>turn<|im_end|></s>"]:
        for special in (True, False):
            ids = parts.backend.encode(text, add_special_tokens=special).ids
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            assert parts.backend.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert parts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert parts.chat_template == "plain {{ messages }}"


def test_ends_are_gathered_from_all_places(folder):
    config = {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}}
    parts = tokenizer_from_folder(folder, config, {"eos_token_id": [2, None, "x", -1]})
    assert parts.eos_ids == {1, 2, 7, 8}


def test_a_saved_truncation_does_not_cut_prompts(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = tokenizer_from_folder(folder, {}, {}).backend.encode("the quick brown fox").ids
    assert ids == trained_tokenizer().encode("the quick brown fox").ids


def test_tokens_that_only_the_config_declares_stay_whole(folder):
    size = trained_tokenizer().get_vocab_size()
    set_config(folder, added_tokens_decoder={str(size): {"content": "<tool>", "special": True}})
    parts = tokenizer_from_folder(folder, {}, {})
    assert parts.backend.encode("a<tool>b", add_special_tokens=False).ids.count(size) == 1
    set_config(folder, added_tokens_decoder={"9": {"content": "<tool>", "special": True}})
    with pytest.raises(InvalidModelFile, match="'<tool>' the id 9"):
        tokenizer_from_folder(folder, {}, {})


def test_the_chat_template_is_found_wherever_it_is(folder):
    def template():
        return tokenizer_from_folder(folder, {}, {}).chat_template

    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    set_config(folder, chat_template=named)
    assert template() == "named"
    set_config(folder, chat_template=None)
    assert template() is None
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert template() == "from json"
    (folder / "chat_template.jinja").write_text("from jinja é", encoding="utf-8")
    assert template() == "from jinja é"


def test_a_slow_tokenizer_is_converted(tmp_path):
    trained = json.loads(trained_tokenizer().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in trained["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "</s>"}')
    backend = tokenizer_from_folder(tmp_path, {}, {}).backend
    for text in TEXTS:
        assert backend.encode(text).ids == trained_tokenizer().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", None, "no tokenizer.json and no other"),
        ("tokenizer.json", "{}", "not a usable tokenizer"),
        ("tokenizer.json", "nonsense", "not a usable tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
    ],
)
def test_a_bad_folder_is_refused(folder, name, content, complaint):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(InvalidModelFile, match=complaint):
        tokenizer_from_folder(folder, {}, {})


def test_a_broken_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(InvalidModelFile, match="could not be converted"):
        tokenizer_from_folder(tmp_path, {}, {})


# --- the default model's GGUF -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    gguf = resolve("smollm2").gguf
    assert gguf is not None
    return tokenizer_from_gguf(gguf.metadata)


def test_smollm2_is_cut_as_it_was_trained(smollm2):
    steps = json.loads(smollm2.backend.to_str())["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in steps] == ["Digits", "ByteLevel"]
    assert steps[0]["individual_digits"] is True
    assert (steps[1]["add_prefix_space"], steps[1]["use_regex"]) == (False, True)
    assert smollm2.backend.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert smollm2.backend.encode("Hello, world!").tokens == ["Hello", ",", "Ġworld", "!"]
    assert smollm2.backend.encode("<|im_start|>user\n").ids[0] == 1
    assert smollm2.backend.encode("a<|im_end|>").ids[-1] == 2


def test_smollm2_brings_its_special_tokens_and_template(smollm2):
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm2.eos_ids == {2}
    assert smollm2.chat_template.startswith("{% for message in messages %}")
    assert smollm2.backend.get_vocab_size() == 49152
    assert smollm2.backend.encode("").ids == []


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_gives_text_back(smollm2, text):
    assert smollm2.backend.decode(smollm2.backend.encode(text).ids, skip_special_tokens=False) == text


# --- other GGUF tokenizers ----------------------------------------------------------------------------------


def byte_level_metadata(pre="gpt-2", **entries):
    trained = json.loads(trained_tokenizer().to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in trained["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in entries.items()}


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_gguf_equals_the_tokenizer_it_was_made_of(text):
    parts = tokenizer_from_gguf(byte_level_metadata(ggml__add_bos_token=True))
    assert parts.backend.encode(text).ids == trained_tokenizer().encode(text).ids
    assert parts.backend.decode(parts.backend.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a12345 I'M", ["a", "12345", "ĠI", "'", "M"]),
        ("smollm", "a12345 67", ["a", "1", "2", "3", "4", "5", "Ġ", "6", "7"]),
        ("llama-bpe", "a12345 I'M!\n\n x", ["a", "123", "45", "ĠI", "'M", "!ĊĊ", "Ġx"]),
        ("dbrx", "a12345 I'M", ["a", "123", "45", "ĠI", "'M"]),
        ("qwen2", "a12345 I'M", ["a", "1", "2", "3", "4", "5", "ĠI", "'M"]),
        ("lfm2", "a12345 I'M", ["a", "123", "45", "ĠI", "'M"]),
        ("command-r", "a12 I'm", ["a", "1", "2", "ĠI", "'m"]),
        ("tekken", "aB12 HTMLPage's", ["a", "B", "1", "2", "ĠHTMLPage", "'s"]),
        ("gpt-4o", "aB1234 HTMLPage's", ["a", "B", "123", "4", "ĠHTMLPage's"]),
    ],
)
def test_each_pre_tokenizer_splits_in_its_own_way(pre, text, pieces):
    backend = tokenizer_from_gguf(byte_level_metadata(pre)).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("pre", "class_name"),
    [("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer"), ("command-r", "CohereTokenizer")],
)
def test_a_pre_tokenizer_cuts_as_the_class_of_transformers_does(pre, class_name):
    transformers = pytest.importorskip("transformers")
    metadata = byte_level_metadata(pre, ggml__add_bos_token=False)
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = getattr(transformers, class_name)(vocab=vocabulary, merges=merges)
    ours = tokenizer_from_gguf(metadata).backend
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("pre", BYTE_LEVEL_KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_known_pre_tokenizer_loses_nothing(pre, text):
    backend = tokenizer_from_gguf(byte_level_metadata(pre)).backend
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == normalized


def test_bos_and_eos_are_added_as_the_file_says():
    def ids(pre, **entries):
        return tokenizer_from_gguf(byte_level_metadata(pre, **entries)).backend.encode("a").ids

    plain = ids("gpt-2")
    assert ids("gpt-2", ggml__add_bos_token=True) == [0, *plain]
    assert ids("gpt-2", ggml__add_eos_token=True) == [*plain, 1]
    assert ids("llama-bpe") == [0, *plain]
    assert ids("llama-bpe", ggml__add_bos_token=False) == plain


def test_the_end_of_turn_that_the_template_writes_is_an_end():
    def ends(**entries):
        return tokenizer_from_gguf(byte_level_metadata(**entries)).eos_ids

    assert ends() == {1}
    assert ends(chat_template="{{ x }}<|im_end|>") == {1, 2}
    assert ends(ggml__eot_token_id=9) == {1, 9}


@pytest.mark.parametrize("pre", ["default", "poro-chat", None, 3])
def test_an_unknown_pre_tokenizer_is_refused_never_guessed(pre):
    with pytest.raises(UnsupportedModel, match=r"pre-tokenizer is .*tokenizer\.json"):
        tokenizer_from_gguf(byte_level_metadata(pre))


def test_an_unknown_kind_of_tokenizer_is_refused():
    with pytest.raises(UnsupportedModel, match="kind 't5'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({"ggml__tokens": None}, "tokens is missing"),
        ({"ggml__tokens": ["a", 3]}, "not a list of str"),
        ({"ggml__tokens": ["a", "a"]}, "repeated"),
        ({"ggml__token_type": [1]}, "1 token types"),
        ({"ggml__merges": ["a b c"]}, "no merge"),
        ({"ggml__merges": ["zz qq"]}, "not usable"),
        ({"ggml__bos_token_id": 1 << 20}, "outside its"),
        ({"ggml__eos_token_id": "x"}, "outside its"),
    ],
)
def test_a_malformed_gguf_tokenizer_is_refused(entries, complaint):
    with pytest.raises(InvalidModelFile, match=complaint):
        tokenizer_from_gguf(byte_level_metadata(**entries))


# --- SentencePiece ------------------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁t", "he", "▁the", "in", "▁a", "▁c", "at", "▁cat", "▁▁"]


def sentencepiece_metadata(**entries):
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz"))
    tokens = [*PIECES, *WORDS, *letters, "<|user|>"]
    num_words = len(WORDS) + len(letters)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(PIECES) + [float(-rank) for rank in range(num_words)] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * num_words + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def reference_sentencepiece(text: str, metadata) -> list[str]:
    """The definition: while some neighbours join to a piece, join those whose piece scores best, leftmost first."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    fallback = [[s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [piece for pieces in fallback for piece in pieces]


@pytest.mark.parametrize("text", ["", "the cat", "  the  cat in a hat", "catthe", "é the\n", "a" * 9, " "])
def test_sentencepiece_follows_its_definition(text):
    metadata = sentencepiece_metadata()
    backend = tokenizer_from_gguf(metadata).backend
    found = backend.encode(text, add_special_tokens=False)
    assert found.tokens == reference_sentencepiece(text, metadata)
    assert backend.decode(found.ids) == text


def test_sentencepiece_adds_bos_and_a_space_unless_told_not_to():
    assert tokenizer_from_gguf(sentencepiece_metadata()).backend.encode("the").tokens == ["<s>", "▁the"]
    bare = tokenizer_from_gguf(sentencepiece_metadata(add_bos_token=False, add_space_prefix=False)).backend
    assert bare.encode("the").tokens == ["t", "he"]
    assert bare.decode(bare.encode(" the").ids) == " the"


def test_sentencepiece_keeps_added_tokens_whole_and_phi3_strips_after_them():
    text = "<|user|>\n the</s>"
    backend = tokenizer_from_gguf(sentencepiece_metadata(add_bos_token=False)).backend
    assert backend.encode(text).tokens == ["<|user|>", "▁", "<0x0A>", "▁the", "</s>"]
    phi3 = tokenizer_from_gguf(sentencepiece_metadata(add_bos_token=False) | {"general.architecture": "phi3"}).backend
    assert [phi3.id_to_token(token) for token in phi3.encode(text).ids] == ["<|user|>", "▁the", "</s>"]


def test_a_stored_order_of_merges_cuts_as_gemmas_class_does():
    transformers = pytest.importorskip("transformers")
    words = ["▁", *"abcdehint", "\n", "th", "the", "▁the", "in", "\n\n", "cat", "at"]
    merges = ["t h", "th e", "▁ the", "i n", "\n \n", "a t", "c at"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *PIECES[3:], *words]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * 5 + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = transformers.GemmaTokenizer(vocab={token: at for at, token in enumerate(tokens)}, merges=pairs)
    ours = tokenizer_from_gguf(metadata).backend
    for text in ["the cat in the hat", "  the\n\n\ncat", "é <bos> the", *TEXTS]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("the").ids == [2, tokens.index("the")]
