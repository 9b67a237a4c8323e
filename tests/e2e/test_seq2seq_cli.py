"""Encoder-decoder models on the command line: documents, refusals, exit codes."""

import json

import pytest
from penstock_command import penstock
from tiny_models import prompt, save_tokenizer
from tiny_seq2seq import SEQ2SEQ, randomized, save_tiny_seq2seq


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("t5")
    save_tiny_seq2seq("t5-gated-untied", path)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "source.txt"
    path.write_text(" ".join(f"w{token}" for token in prompt(300)))
    return path


def refusal(result) -> str:
    """The one line of a refusal."""
    message = result.stderr.decode()
    assert result.returncode == 2, message
    assert not result.stdout
    assert "Traceback" not in message
    (line,) = message.strip().splitlines()
    return line


def test_a_source_is_read_in_tiles_and_answered(folder, source):
    answers = []
    for chunk_size in ("64", "7", "0"):
        result = penstock("run", folder, "-f", source, "--chunk-size", chunk_size, "--max-tokens", 6, "--json")
        document = json.loads(result.stdout)
        answers.append(document["token_ids"])
        lane = document["lane"]
        assert lane["id"] == "transformers-generic-seq2seq-source"
        assert lane["applied"] == (chunk_size != "0")
        chunked = ("any row of any layer", "bidirectional") if lane["applied"] else ("", "")
        assert (lane["boundary"], lane["mask_mode"]) == chunked
        assert document["prompt_tokens"] == 300
        starts = [chunk["start"] for chunk in document["chunks"]]
        assert starts == [0, *(chunk["end"] for chunk in document["chunks"][:-1])]
    assert answers[0] == answers[1] == answers[2]


def test_a_source_comes_from_a_pipe_too(folder, source):
    from_file = penstock("run", folder, "-f", source, "--max-tokens", 4)
    from_pipe = penstock("run", folder, "-f", "-", "--max-tokens", 4, stdin=source.read_bytes())
    assert from_file.returncode == from_pipe.returncode == 0
    assert from_file.stdout == from_pipe.stdout


def test_the_plan_needs_no_weights(folder):
    document = json.loads(penstock("plan", folder, "--prompt-tokens", 5000, "--memory", "700MB", "--json").stdout)
    assert document["lane"]["applied"]
    assert document["fits"]


def test_an_empty_source_is_refused(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text("  \n ")
    for name in ("empty.txt", "blank.txt"):
        assert "The prompt is empty" in refusal(penstock("run", folder, "-f", tmp_path / name))


def test_a_source_past_the_learned_positions_is_refused(tmp_path, source):
    config = SEQ2SEQ["bart"]()
    config.max_position_embeddings = 128
    randomized(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "the model has positions for 128" in refusal(penstock("run", tmp_path, "-f", source))
    for num_tokens, fits in ((128, True), (129, False)):
        plan = json.loads(penstock("plan", tmp_path, "--prompt-tokens", num_tokens, "--json").stdout)
        assert plan["fits"] is fits


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    save_tiny_seq2seq("t5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForSeq2SeqLM": "modeling_mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit(77)")
    assert "such code is never run" in refusal(penstock("run", tmp_path, "-p", "w3"))
