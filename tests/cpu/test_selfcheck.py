"""The self-check tells exact models from wrong ones by measuring, with no list of names, and keeps what it found."""

import json

import pytest
import torch
import transformers
from tiny_causal import tiny_causal_model
from tiny_generic import MUST_SHOW, TROUBLE, causal_model
from tiny_seq2seq import tiny_seq2seq
from tiny_vision_models import tiny_vision_model

import penstock
from penstock.errors import UnsupportedModel
from penstock.foreign.signature import read_signature
from penstock.proof import comparison, selfcheck, shrink, text
from penstock.proof import verdict as kept
from penstock.proof.source import check_real_encoder, check_source
from penstock.proof.verdict import Finding, Verdict, Way

CPU = torch.device("cpu")
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


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "openai-gpt"])
def test_a_model_without_a_cache_object_is_read_from_its_start_each_time(model_type):
    """Its chunks agree where each call reads everything again; that is not reading in chunks."""
    verdict = penstock.selfcheck(tiny_causal_model(model_type))
    assert verdict.way is Way.RECOMPUTED
    assert not verdict.exact


def test_windows_and_rotary_limits_past_the_prompt_are_brought_into_it():
    """A window of 4,096 would never be reached by a short prompt, and a lane that ignored it would look exact."""
    config = MUST_SHOW["gpt-oss"]()
    config.sliding_window = 4096
    model = next(shrink.shrunken_models(transformers.GptOssForCausalLM, config, CPU))
    assert model.config.sliding_window < min(text.PROMPT_LENGTHS)
    assert config.sliding_window == 4096


@pytest.mark.evidence
def test_a_choice_of_keys_is_brought_into_the_prompt():
    """DeepSeek V3.2 attends to 2,048 chosen keys: a prompt that is shorter would show nothing of the choice."""
    config = transformers.DeepseekV32Config()
    model = next(shrink.shrunken_models(transformers.DeepseekV32ForCausalLM, config, CPU))
    assert model.config.index_topk < min(text.PROMPT_LENGTHS)
    assert model.config.index_n_heads == config.index_n_heads


def test_a_large_config_becomes_a_small_copy_with_every_kind_of_layer():
    config = transformers.Qwen3NextConfig()
    model = next(shrink.shrunken_models(transformers.Qwen3NextForCausalLM, config, CPU))
    assert sum(parameter.numel() for parameter in model.parameters()) < shrink.LARGEST_COPY
    assert set(model.config.layer_types) == set(config.layer_types)
    assert model.config.num_hidden_layers < config.num_hidden_layers


def test_layers_that_share_keys_or_have_sizes_of_their_own_stay_so_in_a_small_copy():
    """Gemma 3n's last layers take the keys of earlier ones; Gemma 4's layers have heads of two sizes."""
    config = transformers.Gemma3nTextConfig()
    small = next(shrink.shrunken_models(transformers.Gemma3nForCausalLM, config, CPU)).config
    first_shared = small.num_hidden_layers - small.num_kv_shared_layers
    assert set(small.layer_types[:first_shared]) == set(small.layer_types[first_shared:]) == set(config.layer_types)
    assert set(small.activation_sparsity_pattern) == set(config.activation_sparsity_pattern)
    assert small.num_hidden_layers == len(small.intermediate_size) < 8

    config = transformers.Gemma4TextConfig()
    small = next(shrink.shrunken_models(transformers.Gemma4ForCausalLM, config, CPU)).config
    assert {layer.head_dim for layer in small.per_layer_config} == {layer.head_dim for layer in config.per_layer_config}
    assert small.num_hidden_layers < config.num_hidden_layers


@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("gemma3n_text", Way.PACKED),
        ("gemma4_text", Way.OWN_CACHE),  # pages hold keys of one size
        ("afmoe", Way.PACKED),  # these two view what attention returns
        ("jetmoe", Way.PACKED),
        ("axk2", Way.OWN_CACHE),  # these two read the mask themselves
        ("hy_v4", Way.OWN_CACHE),
    ],
)
def test_models_that_treat_attention_in_ways_of_their_own_are_exact(model_type, way):
    verdict = penstock.selfcheck(tiny_causal_model(model_type))
    assert verdict.exact
    assert verdict.way is way


@pytest.mark.parametrize(
    "config",
    [
        transformers.FalconConfig(),  # 71 heads
        transformers.CodeGenConfig(),  # its sizes have two names each
        transformers.GPTNeoConfig(),  # its layers are numbered by `layer_id`
        transformers.RwkvConfig(),  # no heads
    ],
    ids=lambda config: config.model_type,
)
def test_configs_of_full_size_have_a_small_copy(config):
    model = next(shrink.shrunken_models(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, CPU))
    assert sum(parameter.numel() for parameter in model.parameters()) < shrink.LARGEST_COPY
    assert model.config.num_hidden_layers == 2


def test_positions_are_left_to_models_that_count_them_from_another_number():
    """RoBERTa counts from after its padding token: with positions from 0 on, even a whole prompt would be wrong."""
    verdict = penstock.selfcheck(tiny_causal_model("roberta"))
    assert verdict.exact
    assert not verdict.passes_positions


def test_a_decoder_whose_config_also_describes_an_encoder_has_a_small_copy():
    config = transformers.BartConfig(is_decoder=True, is_encoder_decoder=False)
    model = next(shrink.shrunken_models(transformers.BartForCausalLM, config, CPU))
    assert model.config.decoder_layers == len(model.get_decoder().layers) < config.decoder_layers


def test_a_model_object_in_memory_is_checked_without_touching_it():
    model = causal_model(MUST_SHOW["llama"]())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    verdict = penstock.selfcheck(model)
    assert verdict.exact
    assert model.config._attn_implementation != "penstock"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def rounding_and_memory(name, gain):
    config = MUST_SHOW[name]()
    small = shrink._random_model(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, gain)
    with torch.no_grad():
        return shrink._rounding_share(small), shrink.remembers(small)


def test_weights_are_lowered_where_rounding_would_be_taken_for_a_mistake():
    """Gated delta layers amplify one rounding of the input past what is allowed; the check then takes smaller ones."""
    assert rounding_and_memory("qwen3.5", shrink.GAINS[0])[0] > shrink.ROUNDING_SHARE
    config = MUST_SHOW["qwen3.5"]()
    chosen = next(shrink.shrunken_models(transformers.Qwen3_5ForCausalLM, config, CPU))
    with torch.no_grad():
        assert shrink._rounding_share(chosen) <= shrink.ROUNDING_SHARE
        assert shrink.remembers(chosen)


def test_weights_that_would_hide_a_lost_state_are_told_apart():
    """With weights that small, Mamba forgets so fast that its mistake would be below what is allowed."""
    assert rounding_and_memory("mamba", shrink.GAINS[0])[1]
    assert not rounding_and_memory("mamba", shrink.GAINS[-1])[1]


@pytest.mark.parametrize("gains", [(shrink.GAINS[-1],), (0.2,)])
def test_a_copy_that_forgets_proves_nothing(gains, monkeypatch):
    monkeypatch.setattr(shrink, "GAINS", gains)
    verdict = check("mamba")
    assert not verdict.exact
    assert "forgets its first tokens" in verdict.reason


@pytest.mark.parametrize("name", ["t5", "t5gemma", "marian"])
def test_an_encoder_decoder_model_in_memory_is_checked_by_its_source(name):
    verdict = penstock.selfcheck(tiny_seq2seq(name))
    assert verdict.exact
    assert verdict.way is Way.TILES
    assert verdict.max_difference <= 1e-4


def test_a_decoder_that_looks_at_all_rows_of_a_source_at_once_is_caught():
    """Its encoder can be read in tiles, and its keys and values of the source cannot be built in tiles."""

    def centre(module, args, kwargs):
        states = kwargs["encoder_hidden_states"]
        return args, kwargs | {"encoder_hidden_states": states - states.mean(1, keepdim=True)}

    model = tiny_seq2seq("bart")
    assert check_source(model).exact
    model.get_decoder().register_forward_pre_hook(centre, with_kwargs=True)
    verdict = check_source(model)
    assert not verdict.exact
    assert "logits over tiles differ from the plain ones" in verdict.reason


def test_an_image_text_model_in_memory_is_checked_by_text():
    verdict = penstock.selfcheck(tiny_vision_model("gemma3"))
    assert verdict.exact
    assert verdict.way is Way.OWN_CACHE
    assert verdict.picture is None


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_bfloat16_encoders_are_held_to_float32(name):
    found = check_real_encoder(tiny_seq2seq(name, dtype=torch.bfloat16))
    assert found.exact
    assert found.max_difference > 1e-4
    assert "bfloat16" in found.reason


def test_bfloat16_weights_are_held_to_float32():
    model = causal_model(MUST_SHOW["llama"](), dtype=torch.bfloat16)
    verdict = penstock.selfcheck(model)
    found = text.check_real_text(model, verdict)
    assert found.exact
    assert found.max_difference > 1e-4
    assert "bfloat16" in found.reason


def test_one_prompt_may_fail_and_two_may_not():
    good, bad = (comparison.Difference(largest=largest, allowed=1e-4) for largest in (1e-6, 1.0))
    assert comparison.judged([good, bad, good], "logits", "the whole prompt's").exact
    assert not comparison.judged([good, bad, bad], "logits", "the whole prompt's").exact


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
    key = kept.verdict_key({"model_type": "x"}, dtype="float32", lane="lane", backend="cpu")
    assert kept.load_verdict(key) is None
    kept.save_verdict(key, verdict)
    assert kept.load_verdict(key) == verdict
    assert not list(tmp_path.rglob("*.part"))
    path = next(tmp_path.rglob("*.json"))
    path.write_text(json.dumps({"exact": True}))
    assert kept.load_verdict(key) is None


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"lane": "another"}, {"backend": "cuda"}])
def test_the_key_changes_with_what_the_verdict_depends_on(change):
    facts = {"dtype": "float32", "lane": "lane", "backend": "cpu"}
    config = {"model_type": "x", "hidden_size": 8}
    assert kept.verdict_key(config, **facts) != kept.verdict_key(config, **facts | change)
    assert kept.verdict_key(config, **facts) != kept.verdict_key({**config, "hidden_size": 9}, **facts)
