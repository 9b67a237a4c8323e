"""The command line as a person uses it: real processes, the real default model, real signals."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import prompt, save_tiny_model

from penstock.plan.machine import num_physical_cores

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
RUN_KEYS = [
    *["model", "lane", "plan", "prompt_tokens", "cached_tokens", "chunks", "token_ids", "text"],
    *["finish_reason", "ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_bytes"],
]
PLAN_KEYS = [
    *["model", "lane", "prompt_tokens", "chunk_size", "num_chunks", "runtime_bytes", "weight_bytes"],
    *["kv_bytes", "state_bytes", "activation_bytes", "logits_bytes", "peak_bytes", "fits", "adjustments"],
]
LANE_KEYS = ["id", "eligible", "applied", "reason", "boundary", "mask_mode"]


def penstock(*arguments, stdin=None, timeout=120, **environment):
    return subprocess.run(
        [*PENSTOCK, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """About 900 tokens of the tiny tokenizer's words."""
    path = tmp_path_factory.mktemp("text") / "document.txt"
    path.write_text(" ".join(f"w{token}" for token in prompt(900)))
    return path


def test_help_is_quick_and_lists_the_commands():
    started = time.perf_counter()
    shown = penstock("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout.decode() for command in ("run", "chat", "plan"))
    best = min(_seconds("--help") for _ in range(3))
    assert min(best, time.perf_counter() - started) < 0.5


def _seconds(*arguments):
    started = time.perf_counter()
    penstock(*arguments)
    return time.perf_counter() - started


def test_plan_answers_quickly_with_exactly_the_agreed_keys():
    shown = penstock("plan", "--prompt-tokens", 6000, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert list(report) == PLAN_KEYS
    assert list(report["lane"]) == LANE_KEYS
    assert report["fits"] is True
    assert min(_seconds("plan", "--prompt-tokens", 6000) for _ in range(3)) < 3


def test_plan_draws_the_peak_against_the_chunk_size():
    shown = penstock("plan", "--prompt-tokens", 6000).stdout.decode()
    assert "6,000 (whole)" in shown
    assert "█" in shown


def test_run_prints_one_json_document_with_exactly_the_agreed_keys(tiny_folder, document):
    shown = penstock("run", tiny_folder, "-f", document, "--chunk-size", 256, "--max-tokens", 4, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert list(report) == RUN_KEYS
    assert list(report["lane"]) == LANE_KEYS
    assert report["lane"]["applied"] is True
    assert [(c["start"], c["end"]) for c in report["chunks"]] == [(0, 256), (256, 512), (512, 768), (768, 900)]
    assert report["plan"]["num_chunks"] == 4
    assert report["prompt_tokens"] == 900
    assert set(report["peak_bytes"]) == {"measured", "predicted"}


def test_a_run_leaves_a_trace_that_is_explained(tiny_folder, document, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "perfetto.json"
    flags = ["--chunk-size", 256, "--max-tokens", 4, "--trace", trace]
    assert b"trace.json" in penstock("run", tiny_folder, "-f", document, *flags).stderr
    shown = penstock("trace", trace, "--perfetto", picture).stdout.decode()
    assert "prompts were read in chunks" in shown
    assert "tokens of request 0 after 256" in shown
    assert json.loads(picture.read_text())["traceEvents"]
    summary = json.loads(penstock("trace", trace, "--slowest", 1, "--json").stdout)
    assert (summary["read_tokens"], summary["written_tokens"], len(summary["slowest"])) == (900, 4, 1)
    for wrong in (["trace", document], ["run", tiny_folder, "-p", "w5", "--trace", tmp_path]):
        refused = penstock(*wrong)
        assert refused.returncode == 2
        assert refused.stderr.startswith(b"penstock: ")


def test_a_prompt_read_whole_does_not_claim_chunks(tiny_folder, document):
    for arguments, environment in ((["--chunk-size", "0"], {}), ([], {"PENSTOCK_CHUNK_SIZE": "0"})):
        shown = penstock("run", tiny_folder, "-f", document, "--max-tokens", 1, "--json", *arguments, **environment)
        report = json.loads(shown.stdout)
        assert len(report["chunks"]) == 1
        assert report["lane"]["applied"] is False
        assert (report["lane"]["boundary"], report["lane"]["mask_mode"]) == ("", "")


def test_logprobs_appear_only_where_they_were_asked_for(tiny_folder):
    shown = penstock("run", tiny_folder, "-p", "w5 w6", "--max-tokens", 2, "--json", "--logprobs", 2)
    report = json.loads(shown.stdout)
    assert [len(entry["alternatives"]) for entry in report["logprobs"]] == [2] * len(report["token_ids"])


def test_files_come_first_then_the_text_and_standard_input_is_a_file(tiny_folder, tmp_path):
    (tmp_path / "a.txt").write_text("w10 w11")
    arguments = ["--max-tokens", 1, "--json"]
    both = penstock("run", tiny_folder, "-f", tmp_path / "a.txt", "-f", "-", "-p", "w14", *arguments, stdin=b"w12 w13")
    plain = penstock("run", tiny_folder, "-p", "w10 w11 w12 w13 w14", *arguments)
    both, plain = json.loads(both.stdout), json.loads(plain.stdout)
    assert both["prompt_tokens"] == plain["prompt_tokens"] == 5
    assert both["token_ids"] == plain["token_ids"]


def test_the_default_model_answers():
    shown = penstock("run", "-p", "What is the capital of France?", "--max-tokens", 12)
    assert shown.returncode == 0, shown.stderr
    assert "Paris" in shown.stdout.decode()


def test_adjustments_are_reported_and_strict_refuses_them(tiny_folder, document):
    arguments = ["run", tiny_folder, "-f", document, "--context", 5000, "--max-tokens", 1, "--json"]
    report = json.loads(penstock(*arguments).stdout)
    assert any("5000" in adjustment for adjustment in report["plan"]["adjustments"])
    refused = penstock(*arguments, "--strict")
    assert refused.returncode == 2
    assert b"strict" in refused.stderr


class BadInput:
    """Each is refused with one sentence, exit code 2, nothing on stdout, and no traceback."""

    def __init__(self, folder: Path, document: Path, scratch: Path):
        self.folder, self.document, self.scratch = folder, document, scratch

    def copy(self, name, change):
        target = self.scratch / name
        target.mkdir()
        for path in self.folder.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        change(target)
        return target

    def arguments(self, case):
        text, weights = ["-p", "w5"], "model.safetensors"
        (self.scratch / "latin1.txt").write_bytes(b"caf\xe9 au lait")
        (self.scratch / "empty.txt").write_bytes(b"")
        (self.scratch / "bad.gguf").write_bytes(b"GGUF" + bytes(200))
        (self.scratch / "text.gguf").write_bytes(b"not a model")
        cases = {
            "nothing to read": lambda: [self.folder],
            "empty text": lambda: [self.folder, "-p", ""],
            "empty file": lambda: [self.folder, "-f", self.scratch / "empty.txt"],
            "empty standard input": lambda: [self.folder, "-f", "-"],
            "longer than the context": lambda: [self.folder, "-f", self.document, "-f", self.document],
            "longer than --context": lambda: [self.folder, "-f", self.document, "--context", 500],
            "longer than the memory": lambda: ["smollm2", "-f", self.document, "--memory", "440MB"],
            "chunk size below 0": lambda: [self.folder, *text, "--chunk-size", "-1"],
            "chunk size not a number": lambda: [self.folder, *text, "--chunk-size", "some"],
            "overlap as large as the chunk": lambda: [self.folder, *text, "--chunk-size", 8, "--overlap", 8],
            "memory below the weights": lambda: ["smollm2", *text, "--memory", "200MB"],
            "memory not a size": lambda: [self.folder, *text, "--memory", "lots"],
            "no weights": lambda: [self.copy("no-weights", lambda f: (f / weights).unlink()), *text],
            "truncated weights": lambda: [
                self.copy("cut", lambda f: (f / weights).write_bytes((f / weights).read_bytes()[:5000])),
                *text,
            ],
            "weights of another kind": lambda: [
                self.copy("pickle", lambda f: (f / weights).rename(f / "pytorch_model.bin")),
                *text,
            ],
            "garbage weights": lambda: [self.copy("garbage", lambda f: (f / weights).write_bytes(b"\xff" * 99)), *text],
            "corrupt GGUF": lambda: [self.scratch / "bad.gguf", *text],
            "not a GGUF": lambda: [self.scratch / "text.gguf", *text],
            "no tokenizer": lambda: [self.copy("mute", lambda f: (f / "tokenizer.json").unlink()), *text],
            "no config": lambda: [self.copy("blank", lambda f: (f / "config.json").unlink()), *text],
            "broken config": lambda: [self.copy("odd", lambda f: (f / "config.json").write_text("{")), *text],
            "another architecture": lambda: [
                self.copy("other", lambda f: (f / "config.json").write_text('{"model_type": "rwkv"}')),
                *text,
            ],
            "invalid UTF-8": lambda: [self.folder, "-f", self.scratch / "latin1.txt"],
            "missing file": lambda: [self.folder, "-f", self.scratch / "absent.txt"],
            "a folder as file": lambda: [self.folder, "-f", self.scratch],
            "missing model": lambda: [self.scratch / "absent", *text],
            "hub id offline": lambda: ["nobody/nothing-of-that-name", *text],
            "unknown lane": lambda: [self.folder, *text, "--lane", "fast"],
            "temperature below 0": lambda: [self.folder, *text, "--temperature", -1],
            "unknown flag": lambda: [self.folder, *text, "--wrong"],
        }
        return cases[case]() if case else list(cases)


@pytest.mark.parametrize("case", BadInput(Path(), Path(), Path("/tmp")).arguments(None))
def test_bad_input_gets_one_sentence_and_exit_code_2(case, tiny_folder, document, tmp_path):
    before = sorted(path.name for path in Path.cwd().iterdir())
    arguments = BadInput(tiny_folder, document, tmp_path).arguments(case)
    refused = penstock("run", *arguments, "--json", stdin=b"", HF_HUB_OFFLINE="1")
    message = refused.stderr.decode()
    assert refused.returncode == 2, message
    assert refused.stdout == b""
    assert "Traceback" not in message
    if case != "unknown flag":
        assert message.count("\n") == 1, message
        assert message.startswith("penstock: "), message
    assert sorted(path.name for path in Path.cwd().iterdir()) == before


def test_a_file_that_cannot_fit_is_refused_before_any_step(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a word and another " * 50_000)
    started = time.perf_counter()
    refused = penstock("run", "-f", path, "--json")
    assert refused.returncode == 2
    assert b"8192" in refused.stderr
    assert time.perf_counter() - started < 30


def test_standard_input_that_outgrows_the_plan_is_refused_when_it_does(tiny_folder):
    refused = penstock("run", tiny_folder, "-f", "-", "--chunk-size", 64, "--json", stdin=b"w5 " * 100_000)
    assert refused.returncode == 2
    assert b"1024" in refused.stderr
    assert refused.stdout == b""


def test_ctrl_c_stops_within_a_chunk_and_says_where(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 700)
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*PENSTOCK, "run", "-f", str(path), "-p", "Why?", "--chunk-size", "64"],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(follower)
    shown = _read_until(leader, b"tok/s", timeout=90)
    assert b"left" in shown, shown
    process.send_signal(signal.SIGINT)
    interrupted_at = time.perf_counter()
    shown += _read_until(leader, b"Stopped", timeout=30)
    process.wait(timeout=30)
    assert time.perf_counter() - interrupted_at < 15
    assert process.returncode == 130
    assert b"prompt tokens read" in shown + _read_until(leader, b"\x00", timeout=1)
    assert b"Traceback" not in shown
    os.close(leader)


def _read_until(descriptor, marker, timeout):
    shown, deadline = b"", time.monotonic() + timeout
    while marker not in shown and time.monotonic() < deadline:
        ready, _, _ = select.select([descriptor], [], [], 0.2)
        if ready:
            try:
                shown += os.read(descriptor, 65536)
            except OSError:
                break  # the other side has closed
    return shown


def test_chat_remembers_and_reads_only_what_is_new():
    shown = penstock("chat", "--max-tokens", 20, stdin=b"What is the capital of France?\nAnd of Italy?\n\n")
    assert shown.returncode == 0, shown.stderr
    assert b"Paris" in shown.stdout
    assert b"Rome" in shown.stdout
    assert b"cached" in shown.stderr


def test_threads_default_to_physical_cores():
    assert 1 <= num_physical_cores() <= os.cpu_count()
