"""Readers in processes of their own: the same question to each, and the same answer from those with equal weights."""

import subprocess

import pytest
from tiny_models import prompt

from penstock.bench.peers import PeerFailed, Reader, interpreter, own_settings, peer_settings
from penstock.config import DEFAULT_MODEL
from penstock.engine.loading import load_tokenizer
from penstock.errors import InvalidSetting
from penstock.models.files import resolve


@pytest.fixture(scope="module")
def readings(tiny):
    folder = str(tiny("llama")[0])
    own = own_settings("penstock", folder, context=400, chunk_size=7, dtype="float32", threads=1)
    peers = peer_settings(["transformers"], folder, context=400, dtype="float32", threads=1)
    found = {}
    for settings in (own, *peers):
        with Reader(settings) as reader:
            found[settings.name] = (reader.loaded, [reader.read(prompt(n), 6) for n in (90, 300)])
    return found


def test_readers_with_equal_weights_write_equal_tokens(readings):
    assert set(readings) == {"penstock", "transformers, whole", "transformers, chunks of 512"}
    written = {tuple(reading.token_ids for reading in of_two) for _, of_two in readings.values()}
    assert len(written) == 1
    assert all(len(tokens) == 6 for tokens in written.pop())


def test_times_and_peaks_are_those_of_the_process(readings):
    for loaded, of_two in readings.values():
        assert 0 < loaded.loaded_bytes <= loaded.load_peak_bytes
        for reading in of_two:
            assert 0 < reading.read_s < 60
            assert reading.written_tokens_per_s > 0
            assert reading.peak_bytes > 100e6  # Python and torch alone


def test_a_reader_that_cannot_begin_says_why(tmp_path):
    with pytest.raises(PeerFailed, match=r"penstock failed: .*config\.json"):
        Reader(own_settings("penstock", str(tmp_path), context=64, chunk_size=None))


def test_what_a_peer_cannot_do_is_refused(tiny):
    with pytest.raises(InvalidSetting, match="'vllm'"):
        peer_settings(["vllm"], "smollm2", context=64)
    with pytest.raises(InvalidSetting, match="GGUF"):
        peer_settings(["llama.cpp"], str(tiny("llama")[0]), context=64)


@pytest.mark.evidence
def test_all_peers_answer_the_same_question_alike():
    has_llama_cpp = subprocess.run(
        [interpreter("llama.cpp"), "-c", "import llama_cpp"], check=False, capture_output=True
    )
    if has_llama_cpp.returncode:
        pytest.skip("llama-cpp-python is not installed, and PENSTOCK_PEER_PYTHON names no interpreter that has it")
    backend = load_tokenizer(resolve(DEFAULT_MODEL)).backend
    question = backend.encode(
        "Rome is the capital of Italy. Berlin is the capital of Germany. Paris is the capital of"
    ).ids
    own = own_settings("penstock", DEFAULT_MODEL, context=256, chunk_size=8)
    answers = {}
    for settings in (own, *peer_settings(["transformers", "llama.cpp"], DEFAULT_MODEL, context=256)):
        with Reader(settings) as reader:
            answers[settings.name] = backend.decode(reader.read(question, 4).token_ids)
    assert len(answers) == 5
    assert all("France" in answer for answer in answers.values()), answers
