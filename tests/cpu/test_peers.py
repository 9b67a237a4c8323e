"""Readers in processes of their own: the same question to each, and the same answer from those with equal weights."""

import os
import re
import subprocess
import sys

import pytest
from tiny_models import prompt
from typer.testing import CliRunner

from penstock.bench.peers import PeerFailed, Reader, ReaderSettings, peer_settings
from penstock.cli.main import app
from penstock.config import DEFAULT_MODEL
from penstock.engine.loading import load_tokenizer
from penstock.errors import InvalidSetting
from penstock.models.files import resolve


@pytest.fixture(scope="module")
def readings(tiny):
    folder = str(tiny("llama")[0])
    own = ReaderSettings(name="penstock", model=folder, context=400, chunk_size=7, dtype="float32", threads=1)
    peers = peer_settings(["transformers"], folder, context=400, dtypes=["float32"], threads=1)
    found = {}
    for settings in (own, *peers):
        with Reader(settings) as reader:
            found[settings.name] = (reader.loaded, [reader.read(prompt(n), 6) for n in (90, 300)])
    return found


def test_readers_with_equal_weights_write_equal_tokens(readings):
    assert set(readings) == {"penstock", "transformers float32, whole", "transformers float32, chunks of 512"}
    written = {tuple(reading.token_ids for reading in of_two) for _, of_two in readings.values()}
    assert len(written) == 1
    assert all(len(tokens) == 6 for tokens in written.pop())


def test_times_and_peaks_are_those_of_the_process(readings):
    for loaded, of_two in readings.values():
        assert 0 < loaded.library_bytes <= loaded.loaded_bytes <= loaded.load_peak_bytes
        for reading in of_two:
            assert reading.read_s > 0
            assert reading.write_s > 0
            assert reading.peak_bytes > 100e6  # Python and torch alone


def test_a_reader_that_cannot_begin_says_why(tmp_path):
    with pytest.raises(PeerFailed, match=r"penstock failed: .*config\.json"):
        Reader(ReaderSettings(name="penstock", model=str(tmp_path)))


def test_only_penstock_writes_many_answers_together_and_scores_a_text(tiny):
    with Reader(ReaderSettings(name="penstock", model=str(tiny("llama")[0]), threads=1)) as reader:
        assert len(reader.read(prompt(64), 2, chunk_size=16).token_ids) == 2
        assert reader.write_together([prompt(n) for n in (30, 31, 32)], 4) > 0
        losses = reader.losses("w3 w4 w5 w6 w7 w8", 6)
    assert len(losses) == 5
    assert sum(losses) / 5 > 0.1


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter that has no library at all."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_peer_that_is_not_installed_is_named(bare_python):
    settings = ReaderSettings(name="llama.cpp bfloat16", reader="llama.cpp", model="m", context=64, python=bare_python)
    with pytest.raises(PeerFailed, match=r"llama_cpp is not installed .* --llama-python"):
        Reader(settings)


def test_what_a_peer_cannot_do_is_refused(tiny):
    with pytest.raises(InvalidSetting, match="GGUF"):
        peer_settings(["llama.cpp"], str(tiny("llama")[0]), context=64)


def test_the_interpreter_of_llama_cpp_is_handed_down(bare_python, tmp_path, monkeypatch):
    monkeypatch.delenv("PENSTOCK_PEER_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was converted yet
    before = dict(os.environ)
    flags = ["bench", "memory", "--peers", "llama.cpp", "--llama-python", bare_python]
    refused = CliRunner().invoke(app, flags)
    assert isinstance(refused.exception, PeerFailed)
    assert re.search(r"could not be converted for llama\.cpp: llama_cpp is not installed", str(refused.exception))
    (peer,) = peer_settings(["llama.cpp"], DEFAULT_MODEL, context=64, formats=["as stored"], llama_python=bare_python)
    assert peer.python == bare_python
    assert dict(os.environ) == before


@pytest.mark.evidence
def test_all_peers_answer_the_same_question_alike():
    python = os.environ.get("PENSTOCK_PEER_PYTHON") or sys.executable
    has_llama_cpp = subprocess.run([python, "-c", "import llama_cpp"], check=False, capture_output=True)
    if has_llama_cpp.returncode:
        pytest.skip("llama-cpp-python is not installed, and PENSTOCK_PEER_PYTHON names no interpreter that has it")
    backend = load_tokenizer(resolve(DEFAULT_MODEL)).backend
    question = backend.encode(
        "Rome is the capital of Italy. Berlin is the capital of Germany. Paris is the capital of"
    ).ids
    own = ReaderSettings(name="penstock", model=DEFAULT_MODEL, context=256, chunk_size=8)
    answers = {}
    peers = peer_settings(["transformers", "llama.cpp"], DEFAULT_MODEL, context=256, llama_python=python)
    for settings in (own, *peers):
        with Reader(settings) as reader:
            answers[settings.name] = backend.decode(reader.read(question, 4).token_ids)
    assert len(answers) == 5
    assert all("France" in answer for answer in answers.values()), answers
