"""Which lane a config leads to, and why; what a lane says of a prompt that was read."""

import pytest
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT, NATIVE_MULTIMODAL, NATIVE_TEXT, SEQ2SEQ_SOURCE

from penstock.errors import UnknownLane, UnsupportedModel
from penstock.lanes.table import LANES, pick_lane
from penstock.models.shapes import native_shape

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
}
OTHER = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
IMAGES = {"model_type": "llava", "vision_config": {}, "architectures": ["LlavaForConditionalGeneration"]}
SOURCE = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("config", "lane", "reason"),
    [
        (TEXT, NATIVE_TEXT, "llama has a native decoder"),
        (OTHER, GENERIC_TEXT, "gpt2 has no native decoder; gpt2 is run by transformers"),
        (IMAGES, NATIVE_MULTIMODAL, "llava reads text and images; its decoder is native"),
        (IMAGES | {"text_config": TEXT}, NATIVE_MULTIMODAL, "llava reads text and images; its decoder is native"),
        (IMAGES | {"text_config": OTHER}, GENERIC_MULTIMODAL, "llava reads text and images, run by transformers"),
        (IMAGES | {"model_type": "kosmos"}, GENERIC_MULTIMODAL, "kosmos reads text and images, run by transformers"),
        (SOURCE, SEQ2SEQ_SOURCE, "t5 is an encoder-decoder model"),
    ],
)
def test_a_config_leads_to_the_first_lane_that_claims_it(config, lane, reason):
    facts = pick_lane(config, None)
    assert (facts.id, facts.reason, facts.eligible, facts.applied) == (lane, reason, True, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_map": {"AutoModel": "x.y"}}, "comes with code of its own"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by awq"),
        ({"quantization_config": "odd"}, "quantized by unknown"),
        ({"model_type": None}, "names no model_type"),
        ({"architectures": ["BertForMaskedLM"]}, "no causal language model"),
        ({"audio_config": {}}, "has a audio_config"),
    ],
)
def test_what_no_lane_claims_is_refused_with_the_reasons(change, said):
    with pytest.raises(UnsupportedModel, match=said):
        pick_lane(OTHER | change, None)


def test_a_lane_can_be_asked_for_and_is_refused_where_it_cannot_be_had():
    assert pick_lane(TEXT, GENERIC_TEXT).reason.endswith("asked for by --lane")
    with pytest.raises(UnknownLane, match=f"lanes are {', '.join(LANES)}"):
        pick_lane(TEXT, "fast")
    for lane, said in (
        (NATIVE_MULTIMODAL, "reads no images"),
        (GENERIC_MULTIMODAL, "reads no images"),
        (SEQ2SEQ_SOURCE, "no encoder-decoder"),
    ):
        with pytest.raises(UnknownLane, match=rf"{said}.* Leave --lane out"):
            pick_lane(TEXT, lane)
    with pytest.raises(UnknownLane, match="no image-text model"):
        pick_lane(IMAGES | {"architectures": ["CLIPModel"]}, GENERIC_MULTIMODAL)
    with pytest.raises(UnknownLane, match="images and an encoder"):
        pick_lane(IMAGES | {"is_encoder_decoder": True}, GENERIC_MULTIMODAL)


def test_what_was_read_in_several_chunks_says_where_they_end_and_how_they_attend():
    facts = pick_lane(TEXT, None)
    several, one, none = (facts.after_reading(num_chunks) for num_chunks in (3, 1, 0))
    assert (several.applied, several.boundary, several.mask_mode) == (True, "any token", "offset-causal")
    assert (one.applied, one.reason) == (False, "the whole prompt fits in one chunk: nothing had to be split")
    assert none.reason == "the prompt was not read"
    source = pick_lane(SOURCE, None).after_reading(2)
    assert (source.boundary, source.mask_mode) == ("any row of any layer", "bidirectional")


def test_a_shape_counts_the_weights_in_the_bytes_of_their_dtype():
    shapes = {dtype: native_shape(TEXT, dtype) for dtype in ("float32", "bfloat16")}
    assert {dtype: shape.dtype_bytes for dtype, shape in shapes.items()} == {"float32": 4, "bfloat16": 2}
    attention, mlp, norms = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 48, 2 * 32
    assert shapes["float32"].num_parameters == 2 * 100 * 32 + 2 * (attention + mlp + norms) + 32
