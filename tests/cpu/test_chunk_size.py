"""The chunk size, wherever it is said: flag, environment, file or request. It is kept, or its change is reported."""

import json

import penstock_command
import pytest
from logit_recorder import LogitRecorder
from tiny_models import prompt, save_tiny_model

from penstock.errors import InvalidSetting

TOLERANCE = 1e-4


def sizes(output):
    return [chunk.end - chunk.start for chunk in output.chunks]


def read(engine, tokens, **settings):
    recorder = LogitRecorder(engine)
    output = engine.generate(tokens, max_tokens=8, ignore_eos=True, **settings)
    return output, recorder.all


@pytest.mark.parametrize("name", ["llama", "qwen3-5"])
def test_a_request_has_a_chunk_size_of_its_own(name, load):
    tokens = prompt(100)
    expected, logits = read(load(name, chunk_size=32), tokens)
    assert sizes(expected) == [32, 32, 32, 4]
    boundary = 16 if name == "qwen3-5" else 1
    wanted = {48: [48, 48, 4], 64: [64, 36], 0: [100], "auto": [100]}
    if boundary == 1:
        wanted |= {7: [7] * 14 + [2], "50": [50, 50]}
    for chunk_size, found in wanted.items():
        output, own_logits = read(load(name, chunk_size=32, prefix_cache=False), tokens, chunk_size=chunk_size)
        assert output.token_ids == expected.token_ids
        assert (own_logits - logits).abs().max() <= TOLERANCE
        if boundary == 1:
            assert sizes(output) == found, f"chunk size {chunk_size}"


def test_requests_of_unlike_chunk_sizes_run_side_by_side(load):
    engine = load("llama", chunk_size=32, prefix_cache=False)
    prompts = {7: prompt(60, seed=1), None: prompt(70, seed=2), 50: prompt(80, seed=3), 0: prompt(90, seed=4)}
    alone = {size: engine.generate(tokens, max_tokens=8, ignore_eos=True) for size, tokens in prompts.items()}
    ids = {
        engine.submit(tokens, max_tokens=8, ignore_eos=True, chunk_size=size): size for size, tokens in prompts.items()
    }
    outputs = {}
    while len(outputs) < len(prompts):
        outputs |= {ids[event.request_id]: event.output for event in engine.step() if hasattr(event, "output")}
    for size, output in outputs.items():
        assert output.token_ids == alone[size].token_ids
        assert size == 0 or max(sizes(output)) <= (32 if size is None else size)
    assert sizes(outputs[0]) == [90]
    assert 32 < max(sizes(outputs[50])) <= 50, "it shares steps, but is not held to the chunk size of the engine"


@pytest.mark.parametrize("value", [-1, "many", 2.5])
def test_a_chunk_size_that_is_none_is_refused(value, load):
    engine = load("llama")
    with pytest.raises(InvalidSetting, match=r"Chunk size is .*0 \(whole prompt\), 1 or more, or auto"):
        engine.generate([1, 2, 3], chunk_size=value)
    assert not engine.scheduler.has_work


def test_a_chunk_size_below_the_overlap_is_refused(load):
    with pytest.raises(InvalidSetting, match="Overlap is 8, chunk size 8; lower the overlap"):
        load("llama", chunk_size=32, overlap=8).generate([1, 2, 3], chunk_size=8)


def test_a_size_that_is_changed_is_reported_and_refused_under_strict(load):
    engine = load("qwen3-5", chunk_size=64)
    assert not engine.plan(300).adjustments
    planned = engine.plan(300, chunk_size=70)
    assert planned.chunk_size == 64
    assert any("chunk size 70 is 64: chunks end with blocks of 16" in text for text in planned.adjustments)
    assert max(sizes(engine.generate(prompt(300), max_tokens=2, chunk_size=70))) == 64
    strict = load("qwen3-5", chunk_size=64, strict=True)
    with pytest.raises(InvalidSetting, match=r"--strict: chunk size 70 is 64.* Make --chunk-size a multiple of 16"):
        strict.generate(prompt(300), max_tokens=2, chunk_size=70)
    assert max(sizes(strict.generate(prompt(300), max_tokens=2, chunk_size=48))) == 48


# --- the command line ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in ("llama", "qwen3-5"):
        made[name] = tmp_path_factory.mktemp(name)
        save_tiny_model(name, made[name])
    return made


def penstock(folder, *arguments, **environment):
    settings = ["--dtype", "float32", "--memory", "4GiB"]
    return penstock_command.penstock(*arguments, *settings, folder=folder, PENSTOCK_THREADS="1", **environment)


def test_flags_go_before_the_environment_and_that_before_the_file(folders, tmp_path):
    (tmp_path / "penstock.toml").write_text("chunk-size = 10\n")
    words = " ".join(f"w{token}" for token in prompt(40))
    run = ["run", folders["llama"], "-p", words, "--json", "--max-tokens", 2]
    found = []
    for flags, environment in (
        ([], {}),
        ([], {"PENSTOCK_CHUNK_SIZE": "0"}),
        (["--chunk-size", 30], {"PENSTOCK_CHUNK_SIZE": "20"}),
    ):
        done = penstock(tmp_path, *run, *flags, **environment)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        chunks = document["chunks"]
        assert document["plan"]["num_chunks"] == len(chunks)
        assert document["plan"]["chunk_size"] == chunks[0]["end"]
        found.append((chunks[0]["end"], document["prompt_tokens"]))
    num_tokens = found[0][1]
    assert [size for size, _ in found] == [10, num_tokens, 30]


def test_plan_and_run_report_a_changed_size_and_strict_refuses_it(folders, tmp_path):
    words = " ".join(f"w{token}" for token in prompt(120))
    run = ["run", folders["qwen3-5"], "-p", words, "--json", "--max-tokens", 2, "--chunk-size", 70]
    plan = ["plan", folders["qwen3-5"], "--prompt-tokens", 120, "--json", "--chunk-size", 70]
    for command in (run, plan):
        done = penstock(tmp_path, *command)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        if "chunks" in document:
            assert [chunk["end"] for chunk in document["chunks"]] == [64, document["prompt_tokens"]]
        document = document.get("plan", document)
        assert document["chunk_size"] == 64
        assert any("chunk size 70 is 64" in adjustment for adjustment in document["adjustments"])
        refused = penstock(tmp_path, *command, "--strict")
        assert refused.returncode == 2
        assert refused.stdout == b""
        assert "--strict: chunk size 70 is 64" in refused.stderr.decode().replace("\n", " ")
