"""The command line as a person uses it: real processes, the real default model, real signals."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hang_bound import HANG_S, within
from penstock_command import penstock
from tiny_chat_model import save_tiny_chat_model
from tiny_models import prompt, save_tiny_model

from penstock.cli.hints import OTHER_NAMES
from penstock.plan.machine import num_physical_cores
from penstock.trace.document import Trace

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


def from_scratch(*arguments, folder=None, **environment):
    """In an interpreter of its own, as the installed command has it; the other tests fork one that is warm."""
    command = [*PENSTOCK, *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, input=b"", capture_output=True, timeout=HANG_S, cwd=folder, env=environment)


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


def imported_by(*arguments):
    """The packages that a command imports on its way, as the interpreter reports them."""
    command = [sys.executable, "-X", "importtime", *PENSTOCK[1:], *map(str, arguments)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    lines = [line for line in shown.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_help_lists_the_commands():
    shown = from_scratch("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout.decode() for command in ("run", "chat", "plan"))


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["plan", "--prompt-tokens", 6000]])
def test_what_answers_at_once_imports_nothing_heavy(arguments):
    imported = imported_by(*arguments)
    assert {"typer", "penstock"} <= imported
    heavy = {"torch", "transformers", "triton", "fastapi", "matplotlib"}
    assert imported & (heavy if arguments[0] == "plan" else heavy | {"numpy", "tokenizers"}) == set()


def test_a_run_on_a_native_lane_imports_only_what_it_needs(tiny_folder):
    imported = imported_by("run", tiny_folder, "-p", "w5", "--max-tokens", 1)
    assert {"torch", "tokenizers", "penstock"} <= imported
    assert imported & {"transformers", "triton", "fastapi", "matplotlib", "PIL", "sympy"} == set()


def test_plan_answers_with_exactly_the_agreed_keys():
    shown = penstock("plan", "--prompt-tokens", 6000, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert list(report) == PLAN_KEYS
    assert list(report["lane"]) == LANE_KEYS
    assert report["fits"] is True


def test_plan_draws_the_peak_against_the_chunk_size():
    shown = penstock("plan", "--prompt-tokens", 6000).stdout.decode()
    assert "6,000 (whole)" in shown
    assert "█" in shown


def test_plan_says_why_a_prompt_does_not_fit_and_that_nothing_was_adjusted():
    shown = penstock("plan", "--prompt-tokens", 20_000, "--memory", "3GiB")
    assert shown.returncode == 1
    title, *_, verdict = shown.stdout.decode().splitlines()
    assert title.endswith(", 20,000 tokens")  # on one line, however narrow the table is
    assert verdict.startswith("does not fit (20000 tokens leave no room for an answer in the context of 8192)")
    assert verdict.endswith("raise --context to 20256")
    assert b"adjusted" not in shown.stdout
    assert b"\n1 chunk of 20 tokens" in penstock("plan", "--prompt-tokens", 20).stdout


def test_what_a_plan_says_would_do_does():
    arguments = ["plan", "--prompt-tokens", 5000, "--chunk-size", 64, "--dtype", "float32", "--memory"]
    refused = penstock(*arguments, "900MB")
    named = re.search(r"does not fit: shorten the prompt or raise --memory to ([\d.]+[MG]B)$", refused.stdout.decode())
    assert refused.returncode == 1
    assert named, refused.stdout
    assert penstock(*arguments, named[1]).returncode == 0


def test_a_plan_counts_files_as_a_run_does(chat_folder, tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("The gate was opened and the turbine turned. " * 20)
    text = ["-f", path, "-p", "What turned?"]
    planned = json.loads(penstock("plan", chat_folder, *text, "--json").stdout)
    assert planned["prompt_tokens"] == json.loads(penstock("run", chat_folder, *text, "--json").stdout)["prompt_tokens"]
    assert penstock("plan", chat_folder, *text, "--prompt-tokens", 9).returncode == 2


@pytest.mark.parametrize("given", ["100MB", "90MiB", "101MB"])
def test_a_budget_is_told_as_it_was_given(given):
    assert f"budget is {given};".encode() in penstock("plan", "--memory", given).stderr


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


def run_with_input(tiny_folder, *arguments, stdin):
    """Finds (what was read, what stderr said), with a real standard input of any kind; text comes through a pipe."""
    reader, writer = os.pipe()
    os.write(writer, stdin if isinstance(stdin, bytes) else b"")
    os.close(writer)
    given = reader if isinstance(stdin, bytes) else stdin
    done = penstock("run", tiny_folder, *arguments, "--max-tokens", 1, "--json", stdin=given)
    os.close(reader)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["prompt_tokens"], done.stderr.decode().strip()


def test_a_pipe_or_file_at_standard_input_is_read_and_said_to_be(tiny_folder, tmp_path):
    (tmp_path / "a.txt").write_text("w10 w11")
    with (tmp_path / "a.txt").open("rb") as file:
        for stdin in (b"w10 w11", file.fileno()):
            num_tokens, said = run_with_input(tiny_folder, "-p", "w14", stdin=stdin)
            assert num_tokens == 3
            assert said == "Reading standard input, as with -f -."
    assert run_with_input(tiny_folder, stdin=b"w10 w11")[0] == 2
    num_tokens, said = run_with_input(tiny_folder, "-f", str(tmp_path / "a.txt"), stdin=b"w12 w13 w14")
    assert num_tokens == 2  # a loop may read its files' names from there
    assert said == "Standard input is not read beside files; -f - adds it."


def test_no_standard_input_changes_nothing(tiny_folder, tmp_path):
    (tmp_path / "empty").touch()
    reader, writer = os.pipe()  # open and silent, as under some programs
    with (tmp_path / "empty").open("rb") as empty, open(os.devnull, "rb") as null:
        for stdin in (b"", null.fileno(), empty.fileno(), None):
            assert run_with_input(tiny_folder, "-p", "w14", stdin=stdin) == (1, "")
    num_tokens, said = run_with_input(tiny_folder, "-p", "w14", stdin=reader)
    assert num_tokens == 1
    assert said == "Standard input gave nothing for 5 s and is not read; -f - waits for it."
    os.close(reader)
    os.close(writer)


def test_the_default_model_answers():
    shown = from_scratch("run", "-p", "What is the capital of France?", "--max-tokens", 12)
    assert shown.returncode == 0, shown.stderr
    assert "Paris" in shown.stdout.decode()


def test_an_answer_that_is_cut_is_said_to_be(tiny_folder, document):
    run = ["run", tiny_folder, "-f", document, "--max-tokens"]
    assert b"The answer was cut after 3 tokens: --max-tokens." in penstock(*run, 3).stderr
    full = b"The answer was cut after 124 tokens: the context or the memory budget is full."  # 1,024 hold 900 and 124
    assert full in penstock(*run, 900).stderr
    assert b"was cut" not in penstock(*run, 3, "--stop", "w").stderr
    alone = penstock(*run, 1).stderr
    assert b"The answer was cut after 1 token: --max-tokens." in alone
    assert b"wrote 1; peak" in alone  # the first token is the reading's: one alone has no speed


def test_adjustments_are_reported_and_strict_refuses_them(tiny_folder, document):
    arguments = ["run", tiny_folder, "-f", document, "--context", 5000, "--max-tokens", 1, "--json"]
    report = json.loads(penstock(*arguments).stdout)
    assert any("5000" in adjustment for adjustment in report["plan"]["adjustments"])
    refused = penstock(*arguments, "--strict")
    assert refused.returncode == 2
    assert b"strict" in refused.stderr


HELD_BEFORE = "held = b'x' * 1_200_000_000; del held; from penstock.cli.main import main; main()"


@pytest.mark.parametrize("memory", ["1000MB", "3GB"])
def test_a_peak_above_the_budget_is_told_with_the_difference(memory, tiny_folder, tmp_path):
    """The process held more than the first budget before the model was loaded."""
    (tmp_path / "held.py").write_text(HELD_BEFORE)
    run = ["run", tiny_folder, "-p", "w5 w6", "--max-tokens", 2, "--memory", memory]
    shown, reported = [penstock(*run, *more, program=[str(tmp_path / "held.py")]) for more in ([], ["--json"])]
    assert shown.returncode == reported.returncode == 0, shown.stderr + reported.stderr
    report = json.loads(reported.stdout)
    told = [one for one in report["plan"]["adjustments"] if "above --memory" in one]
    assert report["peak_bytes"]["measured"] > 1_200_000_000
    if memory == "3GB":
        assert told == []
        assert b"over budget" not in shown.stderr
    else:
        excess = (report["peak_bytes"]["measured"] - 1_000_000_000) / 1e6
        assert len(told) == 1
        assert f"is {excess:,.1f} MB above --memory, 1,000.0 MB" in told[0]
        assert re.search(rb"over budget: the peak of 1,\d+\.\d MB is \d+\.\d MB above --memory", shown.stderr)


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
    (place := tmp_path / "place").mkdir()
    arguments = BadInput(tiny_folder, document, tmp_path).arguments(case)
    ask = from_scratch if "memory" in case else penstock  # a fork shares memory, and so holds less of its own
    refused = ask("run", *arguments, "--json", folder=place)
    message = refused.stderr.decode()
    assert refused.returncode == 2, message
    assert refused.stdout == b""
    assert "Traceback" not in message
    if case != "unknown flag":
        assert message.count("\n") == 1, message
        assert message.startswith("penstock: "), message
    assert list(place.iterdir()) == [], "it leaves something behind"


HINTS = {
    ("run", "-n", "20"): "No such option -n. Penstock calls it --max-tokens.",
    ("run", "--n-predict=20"): "No such option --n-predict. Penstock calls it --max-tokens.",
    ("chat", "-c", "4096"): "No such option -c. Penstock calls it --context.",
    ("run", "-p", "w5", "-ngl", "99"): "No such option -ngl. Penstock calls it --device.",
    ("run", "--ctx-size", "9"): "No such option --ctx-size. Penstock calls it --context.",
    ("plan", "--max-num-batched-tokens", "9"): "--max-num-batched-tokens. Penstock calls it --chunk-size.",
    ("serve", "-m", "a"): "No such option -m. Penstock takes the model without a flag: penstock serve MODEL.",
    ("plan", "-n", "20"): "No such option: -n",  # a plan writes nothing
    ("run", "smollm2", "What is it?"): "Text goes after -p: penstock run MODEL -p TEXT.",
    ("run", "What is it?"): "'What is it?' is not a model. Text goes after -p: penstock run -p 'What is it?'",
    ("run", str(Path(__file__)), "-p", "a"): f"A text to read goes after -f: penstock run -f {Path(__file__)} -p TEXT",
}


@pytest.mark.parametrize("arguments", HINTS, ids=" ".join)
def test_a_wrong_use_is_told_what_to_write(arguments):
    refused = penstock(*arguments)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert HINTS[arguments] in " ".join(re.sub("[─-╿]", " ", refused.stderr.decode()).split())


def test_models_lists_what_is_there_and_why_something_cannot_be_run(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "hub/models--owner--name/snapshots/0123abc")
    (tmp_path / "mine/strange").mkdir(parents=True)
    (tmp_path / "mine/strange/config.json").write_text('{"model_type": "abacus"}')
    (tmp_path / "mine/broken.gguf").write_bytes(b"GGUF")
    shown = from_scratch("models", "list", "mine", folder=tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"))
    assert shown.returncode == 0, shown.stderr
    *table, broken, strange = shown.stdout.decode().splitlines()
    listed = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in table if row.startswith("│")}
    assert listed == {"smollm2": "optimized-native-text", "owner/name": "optimized-native-text"}
    assert broken.startswith("cannot be run: mine/broken.gguf: ")
    assert strange.startswith("cannot be run: mine/strange: ")
    refused = penstock("models", "list", "nowhere", folder=tmp_path)
    assert (refused.returncode, refused.stderr) == (
        2,
        b"penstock: nowhere is not a folder. Name folders that have models in them.\n",
    )


def test_every_flag_of_ours_that_a_hint_names_exists():
    flags = json.loads((Path(__file__).parents[1] / "golden/flags.json").read_text())
    assert {name for name in OTHER_NAMES if f'"{name}"' not in json.dumps(flags)} == set()


def test_a_file_that_cannot_fit_is_refused_before_any_step(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a word and another " * 50_000)
    refused = penstock("run", "-f", path, "--json", "--trace", tmp_path / "trace.json")
    assert refused.returncode == 2
    assert b"has 200031 tokens; the context holds 8192" in refused.stderr
    assert refused.stderr.endswith(b"raise --context to 200287.\n")  # with room for an answer
    assert Trace.read(tmp_path / "trace.json").steps == ()


def test_a_refused_file_is_counted_and_the_budget_that_is_named_reads_it(document):
    """Real processes: what they hold before the weights is part of the budget."""
    too_little = from_scratch("run", "-f", document, "--memory", "200MB").stderr.decode()
    least = int(re.search(r"needs at least (\d+)MB", too_little)[1])
    refused = from_scratch("run", "-f", document, "--memory", f"{least + 8}MB").stderr.decode()
    told = re.search(
        r"has (\d+) tokens; the memory budget holds .* of (\d+)\. .*raise --memory to ([\d.]+[MG]B)\.", refused
    )
    assert told, refused
    read = from_scratch("run", "-f", document, "--memory", told[3], "--max-tokens", 2, "--json")
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout)["prompt_tokens"] == int(told[1]) > int(told[2])


def test_standard_input_that_outgrows_the_plan_is_refused_when_it_does(tiny_folder):
    refused = penstock("run", tiny_folder, "-f", "-", "--chunk-size", 64, "--json", stdin=b"w5 " * 100_000)
    assert refused.returncode == 2
    assert b"1024" in refused.stderr
    assert refused.stdout == b""


def test_ctrl_c_stops_within_a_chunk_and_says_where(tiny_folder):
    """Standard input says how far a run can have come when it is interrupted: words that follow come after that."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*PENSTOCK, "run", str(tiny_folder), "-f", "-", "-p", "w7", "--chunk-size", "16"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(follower)
    process.stdin.write(words(400))
    process.stdin.flush()
    shown = read_until(leader, b"tok/s")
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(words(500))
        process.stdin.close()
    shown += read_until(leader, b"written")
    assert process.wait(HANG_S) == 130
    stopped = re.search(rb"Stopped: (\d+) prompt tokens read, 0 written", shown)
    assert stopped, shown
    assert int(stopped[1]) <= 400 + 16
    assert b"Traceback" not in shown
    os.close(leader)


def test_what_was_adjusted_is_told_before_anything_is_read(tiny_folder):
    """Standard input gives nothing until it was told; then each is told once."""
    process = subprocess.Popen(
        [*PENSTOCK, "run", str(tiny_folder), "-f", "-", "--context", "5000", "--max-tokens", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    shown = read_until(process.stderr.fileno(), b"adjusted: context 5000")
    rest = process.communicate(words(50), timeout=HANG_S)[1]
    assert process.returncode == 0, rest
    assert (shown + rest).count(b"adjusted: context 5000") == 1
    assert b"read 50 tokens" in rest


def words(num_words):
    return "".join(f"w{token} " for token in prompt(num_words)).encode()


def read_until(descriptor, marker):
    shown = bytearray()

    def is_shown():
        ready, _, _ = select.select([descriptor], [], [], 0)
        try:
            shown.extend(os.read(descriptor, 65536) if ready else b"")
        except OSError:  # the other side has closed
            return True
        return marker in shown

    assert within(HANG_S, is_shown), bytes(shown)
    return bytes(shown)


def test_chat_remembers_and_reads_only_what_is_new():
    shown = penstock("chat", "--max-tokens", 20, stdin=b"What is the capital of France?\nAnd of Italy?\n\n")
    assert shown.returncode == 0, shown.stderr
    assert b"Paris" in shown.stdout
    assert b"Rome" in shown.stdout
    assert b"cached" in shown.stderr


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_chat_model(folder)
    return folder


def test_a_document_is_read_before_the_first_question_is_asked(chat_folder, tmp_path):
    """As much of it as there is time for: one chunk at least, which the question then finds."""
    path = tmp_path / "document.txt"
    path.write_text("The gate was opened and the turbine turned. " * 20)
    arguments = ["-f", path, "--chunk-size", 64, "--max-tokens", 1, "--dtype", "float32"]
    shown = penstock("chat", chat_folder, *arguments, stdin=b"What turned?\n\n").stderr.decode()
    first = re.search(r"read (\d+) tokens \((\d+) of them cached\)", shown)
    assert first, shown
    assert int(first[1]) > 128
    assert int(first[2]) >= 64


def test_a_document_that_leaves_no_room_for_a_question_is_refused_before_one_is_asked(chat_folder, tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("The gate was opened and the turbine turned. " * 100)
    refused = penstock("chat", chat_folder, "-f", path, "--context", 200, stdin=b"What turned?\n\n")
    assert refused.returncode == 2
    assert re.search(rb"has \d+ tokens; the context holds 200", refused.stderr)
    assert b"> " not in refused.stderr


def test_a_chat_answers_questions_about_itself(chat_folder):
    shown = penstock("chat", chat_folder, "--max-tokens", 1, stdin=b"/help\n/bye\nWhat turned?\n")
    assert (shown.returncode, shown.stdout) == (0, b"")
    assert b"Ctrl-C stops an answer" in shown.stderr


def test_threads_default_to_physical_cores():
    assert 1 <= num_physical_cores() <= os.cpu_count()


def test_a_full_disk_is_told_in_one_sentence(tiny_folder):
    command = [sys.executable, "-m", "penstock.cli.main", "plan", tiny_folder, "--prompt-tokens", "5"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("penstock: No space is left on the device")
