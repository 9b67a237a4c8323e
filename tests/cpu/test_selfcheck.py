"""The self-check tells exact models from wrong ones by measuring, with no list of names, and keeps what it found."""

import json

import pytest
import torch
import transformers
from tiny_generic import MUST_SHOW, TROUBLE, causal_model

import penstock
from penstock.errors import UnsupportedModel
from penstock.lanes import selfcheck, shrink, verdicts
from penstock.lanes.signature import read_signature
from penstock.lanes.verdicts import Finding, Verdict, Way

PACKED = ["llama", "gemma3", "gpt-oss", "gpt2"]
OWN_CACHE = ["mamba2", "falcon-h1", "lfm2", "bloom", "rwkv", "llama4"]
WRONG = ["mamba", "falcon-mamba", "jamba", "minimax", "llama-dynamic"]


def check(name):
    config = (MUST_SHOW | TROUBLE)[name]()
    return selfcheck.check_class(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.parametrize("name", PACKED)
def test_models_that_call_the_librarys_attention_are_packed(name):
    verdict = check(name)
    assert verdict.exact
    assert verdict.way is Way.PACKED
    assert verdict.packing.exact
    assert verdict.max_difference <= 1e-4


@pytest.mark.parametrize("name", OWN_CACHE)
def test_models_that_do_not_pack_exactly_keep_their_own_cache(name):
    verdict = check(name)
    assert verdict.exact
    assert verdict.way is Way.OWN_CACHE
    assert not verdict.packing.exact


@pytest.mark.parametrize("name", WRONG)
def test_models_that_are_wrong_in_chunks_are_caught_with_the_measured_difference(name):
    verdict = check(name)
    assert not verdict.exact
    assert verdict.max_difference > 1e-3
    assert f"{verdict.max_difference:.1e}" in verdict.reason


def test_a_model_without_a_cache_object_is_read_from_its_start_each_time():
    assert check("recurrent-gemma").way is Way.RECOMPUTED


def test_windows_and_rotary_limits_past_the_prompt_are_brought_into_it():
    """A window of 4,096 would never be reached by a short prompt, and a lane that ignored it would look exact."""
    config = MUST_SHOW["gpt-oss"]()
    config.sliding_window = 4096
    model = next(shrink.shrunken_models(transformers.GptOssForCausalLM, config))
    assert model.config.sliding_window < min(selfcheck.PROMPT_LENGTHS)
    assert config.sliding_window == 4096


def test_a_large_config_becomes_a_small_copy_with_every_kind_of_layer():
    config = transformers.Qwen3NextConfig()
    model = next(shrink.shrunken_models(transformers.Qwen3NextForCausalLM, config))
    assert sum(parameter.numel() for parameter in model.parameters()) < shrink.LARGEST_COPY
    assert set(model.config.layer_types) == set(config.layer_types)
    assert model.config.num_hidden_layers < config.num_hidden_layers


def test_a_model_object_in_memory_is_checked_without_touching_it():
    model = causal_model(MUST_SHOW["llama"]())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    verdict = penstock.selfcheck(model)
    assert verdict.exact
    assert model.config._attn_implementation != "penstock"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_bfloat16_weights_are_held_to_float32():
    model = causal_model(MUST_SHOW["llama"](), dtype=torch.bfloat16)
    verdict = penstock.selfcheck(model)
    found = selfcheck.check_real_weights(model, verdict)
    assert found.exact
    assert found.max_difference > 1e-4
    assert "bfloat16" in found.reason


def test_one_prompt_may_fail_and_two_may_not():
    good, bad = (selfcheck._Difference(largest=largest, allowed=1e-4) for largest in (1e-6, 1.0))
    assert selfcheck._judged([good, bad, good], "logits", "the whole prompt's").exact
    assert not selfcheck._judged([good, bad, bad], "logits", "the whole prompt's").exact


def test_a_forward_that_cannot_be_called_or_inspected_is_refused():
    class Silent:
        forward = None

    class Hidden:
        def __init__(self):
            self.forward = lambda *values: None
            self.forward.__signature__ = "nothing that can be read"

    for model, words in ((Silent(), "no forward"), (Hidden(), "cannot be inspected")):
        with pytest.raises(UnsupportedModel, match=words):
            read_signature(model)


def test_a_verdict_is_kept_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = Finding(exact=False, max_difference=0.5, reason="because")
    verdict = Verdict(way=Way.OWN_CACHE, packing=finding, **finding.model_dump())
    key = verdicts.verdict_key({"model_type": "x"}, dtype="float32", lane="lane", backend="cpu")
    assert verdicts.load_verdict(key) is None
    verdicts.save_verdict(key, verdict)
    assert verdicts.load_verdict(key) == verdict
    assert not list(tmp_path.rglob("*.part"))
    path = next(tmp_path.rglob("*.json"))
    path.write_text(json.dumps({"exact": True}))
    assert verdicts.load_verdict(key) is None


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"lane": "another"}, {"backend": "cuda"}])
def test_the_key_changes_with_what_the_verdict_depends_on(change):
    facts = {"dtype": "float32", "lane": "lane", "backend": "cpu"}
    config = {"model_type": "x", "hidden_size": 8}
    assert verdicts.verdict_key(config, **facts) != verdicts.verdict_key(config, **facts | change)
    assert verdicts.verdict_key(config, **facts) != verdicts.verdict_key({**config, "hidden_size": 9}, **facts)
