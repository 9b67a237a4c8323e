"""What a place says of a model before anything is loaded: formats, room, context, and what its lane takes away."""

import dataclasses
import json

import pytest

from penstock.bench.work import SHAPES
from penstock.config import EngineConfig, load_config
from penstock.errors import InvalidSetting, MemoryTooSmall
from penstock.lanes.place import NO_SHARED_PREFIXES, TEXT_ALONE
from penstock.lanes.table import LANES, settle
from penstock.models.files import resolve
from penstock.proof.verdict import Finding, Verdict, Way

TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}
IMAGES = {"model_type": "llava", "vision_config": {}, "architectures": ["LlavaForConditionalGeneration"]}
SOURCE = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
}
MIB = 2**20


@pytest.fixture
def place_of(tmp_path):
    def make(config, *, budget_bytes=64 * MIB, device="cpu", **settings):
        (tmp_path / "config.json").write_text(json.dumps(config))
        files = resolve(str(tmp_path), weights=False)
        place = settle(files, load_config({"device": "cpu", **settings}), has_cuda=False)
        return dataclasses.replace(place, budget_bytes=budget_bytes, device=device)

    return make


def priced(place, verdict=None):
    return LANES[place.lane.id].price(place, verdict)


def test_weights_stay_in_few_bits_only_where_they_can(place_of):
    assert place_of(TEXT).quantize == "none"
    assert place_of(TEXT, quantize="int8").quantize == "int8"
    assert place_of(TEXT, quantize="int8").quantization is not None
    with pytest.raises(InvalidSetting, match="needs a GGUF file"):
        _ = place_of(TEXT, quantize="keep").quantize
    with pytest.raises(InvalidSetting, match="is for processors"):
        _ = place_of(TEXT, quantize="int8", device="cuda").quantize
    with pytest.raises(InvalidSetting, match="native-multimodal, not transformers-generic-seq2seq-source"):
        place_of(SOURCE, quantize="int8")


def test_experts_of_gpt_oss_stay_in_mxfp4_on_a_card_and_are_priced_so(place_of):
    shape = SHAPES["gpt-oss-20b"]
    place = place_of(shape, device="cuda")
    assert place.quantize == place_of(shape, device="cuda", quantize="keep").quantize == "keep"
    found = priced(place)
    assert found.weight_bytes < 16 * 2**30
    assert not found.shape.dequantized_tile_bytes
    expanded = priced(place_of(shape, device="cuda", quantize="none"))
    num_values = 24 * 32 * 3 * 2880 * 2880
    assert found.shape.num_quantized == num_values
    codes = expanded.weight_bytes - found.weight_bytes
    assert num_values * (2 - 0.55) < codes < num_values * (2 - 0.53), "four bits, a scale for 32, and filled up groups"
    assert place_of(shape).quantize == "none", "a processor expands them"
    plain = {key: value for key, value in shape.items() if key != "quantization_config"}
    assert place_of(plain, device="cuda").quantize == "none"


def test_a_budget_that_holds_no_chunk_is_refused_with_what_would_do(place_of):
    place = place_of(TEXT)
    assert place.room(priced(place)) >= 128
    with pytest.raises(MemoryTooSmall, match="needs at least"):
        place_of(TEXT, budget_bytes=1000).room(priced(place))


@pytest.mark.parametrize("budget_mib", [1, 4, 16])
def test_a_card_keeps_room_for_a_chunk_beside_its_pages_and_its_captured_steps(place_of, budget_mib):
    place = place_of(TEXT, budget_bytes=budget_mib * MIB, device="cuda", max_running=2)
    kept = priced(place).recording_bytes
    assert kept > 0 == priced(place_of(TEXT)).recording_bytes
    budget = budget_mib * MIB + kept
    place = dataclasses.replace(place, budget_bytes=budget)
    memory = priced(place)
    room = place.room(memory)
    assert room >= 16
    assert memory.peak_bytes(chunk=16, context=16, resident_tokens=room) <= budget
    assert memory.num_logit_rows == 2
    assert place.most_captured == 2


def test_a_context_past_the_models_own_is_said_or_refused(place_of):
    assert place_of(TEXT).context_limit(128) == (128, [])
    assert place_of(TEXT, context=64).context_limit(128) == (64, [])
    limit, said = place_of(TEXT, context=256).context_limit(128)
    assert (limit, len(said)) == (256, 1)
    with pytest.raises(InvalidSetting, match="--strict: context 256"):
        place_of(TEXT, context=256, strict=True).context_limit(128)


def test_what_a_lane_takes_away_is_said_and_does_not_hold(place_of):
    assert place_of(TEXT, overlap=8, chunk_size=16).lane_adjustments() == []
    images = place_of(IMAGES | {"model_type": "kosmos"}, overlap=8, chunk_size=16)
    assert images.lane_adjustments()[0] == NO_SHARED_PREFIXES + TEXT_ALONE
    assert "overlap 8 lowered to 0" in images.lane_adjustments()[1]
    strict = dataclasses.replace(images, config=dataclasses.replace(images.config, strict=True))
    with pytest.raises(InvalidSetting, match="--strict: overlap 8"):
        strict.lane_adjustments()
    source = place_of(SOURCE, overlap=8, chunk_size=16)
    assert source.lane_adjustments() == ["overlap 8 has no meaning for a source; it is 0"]
    assert (source.settings_that_hold().overlap, source.settings_that_hold().prefix_cache) == (0, False)
    whole = dataclasses.replace(source, lane=dataclasses.replace(source.lane, reads_whole=True, reason="why"))
    assert whole.lane_adjustments()[0] == "prompts are read whole: why"
    assert whole.settings_that_hold().chunk_size == 0
    assert place_of(TEXT).settings_that_hold() == place_of(TEXT).config == EngineConfig(device="cpu")


def test_images_have_a_share_of_what_the_weights_leave(place_of):
    native, generic = place_of(IMAGES | {"text_config": TEXT}), place_of(TEXT | IMAGES | {"model_type": "kosmos"})
    assert (native.lane.id, generic.lane.id) == ("optimized-native-multimodal", "transformers-generic-multimodal")
    for place in (native, generic):
        memory = priced(place)
        free = place.budget_bytes - memory.shape.weight_bytes
        assert 0 < memory.media_bytes <= free * 3 / 16
        assert memory.shape.state_bytes_per_token == 32 * place.item_bytes
    assert priced(native).shape.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4 + 32 * 4


def test_a_source_and_a_scored_device_are_priced(place_of):
    assert priced(place_of(SOURCE)).shape.state_bytes_per_token > 0
    assert priced(place_of(TEXT, device="mps")).shape.attends_through_scores


def test_a_verdict_is_kept_for_its_place_alone(place_of, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = place_of(TEXT, lane="transformers-generic-text")
    packing = Finding(exact=True, max_difference=0.0, reason="alike")
    verdict = Verdict(exact=True, max_difference=0.0, reason="alike", way=Way.PACKED, packing=packing)
    assert one.kept_verdict() is None
    one.keep_verdict(verdict)
    assert one.kept_verdict() == verdict
    assert dataclasses.replace(one, dtype="bfloat16").kept_verdict() is None
    assert priced(dataclasses.replace(one, device="cuda"), verdict).num_logit_rows == 64
