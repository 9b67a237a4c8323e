"""The doctor on real models: each finding is provoked, its remedy tried, and then it is gone."""

import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest
from tiny_chat_model import save_tiny_chat_model
from tiny_models import VOCABULARY
from tiny_seq2seq import save_tiny_seq2seq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.doctor.diagnosis import Severity
from penstock.doctor.speed import diagnose_exactness, measured
from penstock.plan.machine import has_fast_bfloat16, num_physical_cores


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(tiny("llama")[0], tmp_path / "model")


def doctor(*arguments, **environment):
    flags = ["--json"] if "--no-json" not in arguments else []
    names = [str(argument) for argument in arguments if argument != "--no-json"]
    shown = CliRunner().invoke(app, ["doctor", *names, *flags], env=environment)
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return shown


def worse(shown, *topics):
    """Finding and remedy of what is not good in these topics."""
    found = json.loads(shown.stdout)["diagnoses"]
    return [(d["finding"], d["remedy"]) for d in found if d["topic"] in topics and d["status"] != "good"]


def test_a_good_model_is_checked_timed_and_given_its_flags(tmp_path):
    folder = tmp_path
    save_tiny_chat_model(folder)
    shown = doctor(folder, "--dtype", "float32", "--threads", 1, "--memory", "4GiB")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    topics = [diagnosis["topic"] for diagnosis in report["diagnoses"]]
    looked_at = ["lane", "files", "tokenizer", "budget", "exactness", "speed", "speed"]
    assert topics[topics.index("lane") :][: len(looked_at)] == looked_at
    assert (report["lane"]["id"], report["dtype"], report["device"]) == ("optimized-native-text", "float32", "cpu")
    speed = report["speed"]
    assert list(speed["read_tokens_per_s"]) == ["16", "64", "128", "256", "512", "1024"]
    assert speed["write_tokens_per_s"] > 0
    flags = speed["recommended"]["flags"].split()
    again = doctor(folder, "--dtype", "float32", "--threads", 1, *flags[:2], "--no-speed")
    assert worse(again, "budget") == []


def test_a_measurement_whose_time_is_up_takes_the_fewest_steps(load):
    engine, num_steps = load("llama", chunk_size="auto", context=1000), itertools.count()
    engine.on_plan = lambda plan: next(num_steps)
    assert list(measured(engine, load_s=0.0, most_seconds=0.0).read_tokens_per_s) == [16]
    assert next(num_steps) <= 12


def test_every_broken_folder_is_named_with_what_to_do(folder):
    weights, tokenizer, config = (folder / name for name in ("model.safetensors", "tokenizer.json", "config.json"))
    code = '{"model_type": "x", "auto_map": {"a": "b.c"}}'
    for path, spoil, topic, found in (
        (weights, lambda p: p.write_bytes(p.read_bytes()[:-100]), "files", "model.safetensors"),
        (weights, lambda p: p.unlink(), "files", "no weights"),
        (tokenizer, lambda p: p.unlink(), "tokenizer", "tokenizer"),
        (config, lambda p: p.write_text("{"), "files", "not JSON"),
        (config, lambda p: p.write_text(code), "lane", "auto_map"),
    ):
        content = path.read_bytes()
        spoil(path)
        shown = doctor(folder, "--dtype", "float32")
        assert shown.exit_code == 2
        ((finding, remedy),) = worse(shown, topic)
        assert found in finding
        assert remedy
        assert shown.stderr.startswith("penstock: 1 problem: ")
        path.write_bytes(content)  # what each of them says: put the file back
    assert worse(doctor(folder, "--no-speed"), "files", "tokenizer", "lane", "budget") == []


def test_too_little_memory_is_a_problem_with_the_amount_that_is_enough(folder):
    ((finding, remedy),) = worse(doctor(folder, "--memory", "100MB", "--no-speed"), "memory", "budget")
    assert "needs at least" in finding
    assert "--memory" in remedy
    least = int(finding.partition("at least ")[2].partition("MB")[0])
    ((finding, remedy),) = worse(doctor(folder, "--memory", f"{least + 5}MB", "--no-speed"), "budget") or [
        ("", "Raise --memory to 4GB for those")
    ]
    amount = remedy.partition("--memory to ")[2].split()[0]
    assert worse(doctor(folder, "--memory", amount, "--no-speed"), "budget", "memory") == []


def test_too_many_threads_are_a_problem(folder):
    ((finding, remedy),) = worse(doctor(folder, "--threads", 512, "--no-speed"), "threads")
    assert "512 threads" in finding
    number = remedy.partition("--threads ")[2].partition(",")[0]
    assert int(number) == num_physical_cores()
    assert worse(doctor(folder, "--threads", number, "--no-speed"), "threads") == []


def test_a_tokenizer_that_cannot_be_streamed_is_noted(folder):
    tokenizer = folder / "tokenizer.json"
    content = tokenizer.read_bytes()
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")).save(str(tokenizer))
    ((finding, remedy),) = worse(doctor(folder, "--no-speed"), "tokenizer")
    assert finding.startswith("encoded whole: ")
    assert "encoded before its first chunk" in remedy
    tokenizer.write_bytes(content)
    assert worse(doctor(folder, "--no-speed"), "tokenizer") == []


def test_a_model_without_a_chat_template_is_noted(folder):
    ((finding, _),) = worse(doctor(folder, "--no-speed"), "template")
    assert "no chat template" in finding
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert worse(doctor(folder, "--no-speed"), "template") == []


@pytest.mark.skipif(not has_fast_bfloat16(), reason="the compiled kernels are for processors with bfloat16")
def test_without_a_compiler_or_with_kernels_switched_off_torch_attends(folder, tmp_path):
    flags = [str(folder), "--no-speed", "--dtype", "bfloat16"]
    # A process looks for its compiler once.
    command = [sys.executable, "-m", "penstock.cli.main", "doctor", *flags, "--json"]
    without = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path), "CC": ""}, capture_output=True)
    ((finding, remedy),) = worse(without, "attention")
    assert "there is no C compiler" in finding
    assert "gcc" in remedy
    ((finding, remedy),) = worse(doctor(*flags, PENSTOCK_CPU_KERNELS="torch"), "attention")
    assert "switched off" in finding
    assert "PENSTOCK_CPU_KERNELS" in remedy
    assert worse(doctor(*flags), "attention") == []


def test_what_cannot_be_timed_by_chunks_says_so(tmp_path):
    save_tiny_seq2seq("t5", tmp_path)
    shown = doctor(tmp_path, "--dtype", "float32", "--threads", 1)
    assert shown.exit_code == 0
    ((finding, _),) = worse(shown, "speed")
    assert "passes over it" in finding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_that_forget_are_found_on_the_loaded_weights(load, dtype):
    engine = load(dtype=dtype)
    assert diagnose_exactness(engine).status is Severity.GOOD

    def forget(plan, result):
        for keys in engine.model.lane.attention.storage.keys:
            keys.zero_()

    engine.on_step = forget
    found = diagnose_exactness(engine)
    assert found.status is Severity.PROBLEM
    assert "--chunk-size 0" in found.remedy


def test_the_text_shows_each_finding_and_its_remedy(folder):
    shown = doctor(folder, "--threads", 512, "--dtype", "float32", "--no-speed", "--no-json")
    assert shown.exit_code == 2
    assert "  problem threads: 512 threads on" in shown.stdout
    assert "          -> Give --threads" in shown.stdout
    shown = doctor(folder, "--threads", 1, "--dtype", "float32", "--memory", "4GiB", "--no-json")
    assert f"  penstock serve {folder} --memory" in shown.stdout
