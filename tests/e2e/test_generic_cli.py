"""Models that transformers runs, from the command line: answers, documents, refusals."""

import json

import pytest
from penstock_command import penstock_text
from tiny_generic import MUST_SHOW, save_causal_model

LANE_KEYS = ["id", "eligible", "applied", "reason", "boundary", "mask_mode"]
TEXT = " ".join(f"w{3 + index % 190}" for index in range(200))
GENERIC = "transformers-generic-text"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in ("mamba2", "jamba"):
        made[name] = tmp_path_factory.mktemp(name)
        save_causal_model(MUST_SHOW[name](), made[name])
    return made


@pytest.fixture
def penstock(cache):
    def call(*arguments):
        return penstock_text(*arguments, XDG_CACHE_HOME=str(cache))

    return call


def test_run_reads_a_folder_that_has_no_native_decoder(folders, penstock):
    shown = penstock("run", folders["mamba2"], "-p", TEXT, "--max-tokens", 5, "--chunk-size", 48, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert list(report["lane"]) == LANE_KEYS
    assert report["lane"]["id"] == GENERIC
    assert report["lane"]["applied"]
    assert report["lane"]["mask_mode"] == "the model's own"
    assert "exact (own-cache)" in report["lane"]["reason"]
    assert len(report["chunks"]) == 5
    assert len(report["token_ids"]) <= 5
    assert any("prefix cache is off" in adjustment for adjustment in report["plan"]["adjustments"])


def test_a_model_read_whole_says_so_and_is_refused_when_strict(folders, penstock):
    shown = penstock("run", folders["jamba"], "-p", TEXT, "--max-tokens", 3, "--chunk-size", 48, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert not report["lane"]["applied"]
    assert "differ from the whole prompt's by" in report["lane"]["reason"]
    assert len(report["chunks"]) == 1
    shown = penstock("run", folders["jamba"], "-p", TEXT, "--strict")
    assert shown.returncode == 2
    assert shown.stderr.startswith("penstock: --strict")
    assert "Traceback" not in shown.stderr


def test_plan_reads_only_config_and_headers(folders, penstock):
    shown = penstock("plan", folders["mamba2"], "--prompt-tokens", 400, "--memory", "4GiB", "--json")
    assert shown.returncode == 0, shown.stderr
    plan = json.loads(shown.stdout)
    assert plan["lane"]["id"] == GENERIC
    assert 0 < plan["weight_bytes"] < 2_000_000
    assert plan["state_bytes"] > 0
    assert plan["fits"]


def test_doctor_shows_the_verdict_and_checks_again_when_asked(folders, penstock):
    flags = ("--dtype", "float32", "--no-speed")
    first = penstock("doctor", folders["mamba2"], *flags, "--rerun", "--json")
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert not report["verdict_was_kept"]
    assert report["verdict"]["exact"]
    assert report["verdict"]["way"] == "own-cache"
    native = ["optimized-native-text", "optimized-native-multimodal"]
    assert [lane["id"] for lane in report["lanes"]][:3] == [*native, GENERIC]
    assert report["cpu_kernels"] == {"compiled": False, "reason": "the compiled ones are for bfloat16, not float32"}
    again = json.loads(penstock("doctor", folders["mamba2"], *flags, "--json").stdout)
    assert again["verdict_was_kept"]
    assert again["verdict"] == report["verdict"]
    assert "exact" in penstock("doctor", folders["mamba2"], *flags).stdout


def test_code_that_comes_with_a_model_is_refused_in_one_sentence(tmp_path, penstock):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    for command in (["run", tmp_path, "-p", "hello"], ["plan", tmp_path], ["doctor", tmp_path]):
        shown = penstock(*command)
        assert shown.returncode == 2
        assert "code of its own (auto_map)" in shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1


def test_an_architecture_that_the_library_does_not_know_is_refused(tmp_path, penstock):
    config = {"model_type": "spiral", "architectures": ["SpiralForCausalLM"], "hidden_size": 8, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "num_attention_heads": 1}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    shown = penstock("run", tmp_path, "-p", "hello")
    assert shown.returncode == 2
    assert "'spiral'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_default_models_gguf_runs_through_transformers(penstock):
    # In bfloat16 the library rounds the logits of the two likeliest first tokens to the same number.
    asked = ("-p", "What is the capital of France?", "--max-tokens", 8, "--dtype", "float32")
    shown = penstock("run", "smollm2", "--lane", GENERIC, *asked)
    assert shown.returncode == 0, shown.stderr
    assert "Paris" in shown.stdout
