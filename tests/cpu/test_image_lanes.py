"""What both lanes for image-text models do alike: ours, and that of transformers."""

import pytest
import torch
from image_answers import EXACT, NUM_ENCODED, SAMPLING, answer, finished, plain
from lane_ids import GENERIC_MULTIMODAL, NATIVE_MULTIMODAL
from logit_recorder import LogitRecorder
from tiny_models import prompt
from tiny_vision_models import IMAGE_TOKEN, ON_EVERY_LANE, TEXT, count_images, pictures

from penstock.errors import InvalidMedia, InvalidSetting
from penstock.foreign import features as media_features

pytestmark = pytest.mark.parametrize("lane", [NATIVE_MULTIMODAL, GENERIC_MULTIMODAL])


@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_each_image_is_encoded_once(name, lane, load_vision):
    engine = load_vision(name, lane=lane, chunk_size=3)
    encoded = count_images(engine.model.lane.model, name)
    answer(engine)
    assert sum(encoded) == NUM_ENCODED[name]
    answer(engine)
    assert sum(encoded) == NUM_ENCODED[name], "the same images came again and are known"


def test_images_and_prefixes_of_another_scope_are_not_found(lane, load_vision):
    engine = load_vision("llava", lane=lane, chunk_size=3)
    encoded = count_images(engine.model.lane.model, "llava")
    cached = [answer(engine, scope=scope).num_cached_tokens for scope in ("one", "other", "one")]
    assert sum(encoded) == 2 * NUM_ENCODED["llava"]
    assert cached[:2] == [0, 0]
    assert (cached[2] > 0) == (engine.scheduler.prefix is not None)


def test_the_pixels_of_a_prompt_are_hashed_once(lane, load_vision, monkeypatch):
    engine, hashed = load_vision("llava", lane=lane, chunk_size=3), []
    medium = media_features._medium
    monkeypatch.setattr(media_features, "_medium", lambda *given: hashed.append(1) or medium(*given))
    answer(engine)
    assert len(hashed) == 2, "one for each picture"


@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_text_alone_is_read_too(name, lane, tiny_vision, load_vision):
    tokens = [token for token in prompt(60) if token < IMAGE_TOKEN]
    written, reference = plain(tiny_vision(name)[1], {"input_ids": torch.tensor([tokens])})
    engine = load_vision(name, lane=lane, chunk_size=7, prefix_cache=False)
    for given in (tokens, " ".join(f"w{token}" for token in tokens)):
        recorder = LogitRecorder(engine)
        assert engine.generate(given, **SAMPLING).token_ids == written
        assert float((recorder.all - reference).abs().max()) <= EXACT


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3", "llava", "smolvlm"])
def test_requests_at_once_get_what_each_gets_alone(name, lane, load_vision):
    tokens = [token for token in prompt(50) if token < IMAGE_TOKEN]
    settings = {"lane": lane, "chunk_size": 7, "prefix_cache": False}
    engine = load_vision(name, **settings)
    alone = [answer(engine).token_ids, engine.generate(tokens, **SAMPLING).token_ids]
    ids = [engine.submit(TEXT, images=pictures(2), **SAMPLING), engine.submit(tokens, **SAMPLING)]
    assert [output.token_ids for output in finished(engine, ids)] == alone
    assert engine.model.lane.num_kept == 0


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_a_preempted_request_is_read_again_with_its_images(name, lane, load_vision):
    """The pool holds one request and a part of the other; what was written is read again behind the images."""
    both = (pictures(2), pictures(3)[1:])
    expected = [answer(load_vision(name, lane=lane, chunk_size=7), images).token_ids for images in both]
    engine = load_vision(name, lane=lane, chunk_size=7, num_blocks=8)
    ids = [engine.submit(TEXT, images=images, **SAMPLING) for images in both]
    assert [output.token_ids for output in finished(engine, ids)] == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.model.lane.num_kept == 0


def test_no_chunk_ends_inside_an_image_that_sees_itself(lane, load_vision):
    engine = load_vision("gemma3", lane=lane, chunk_size=5, prefix_cache=False)
    request_id = engine.submit(TEXT, images=pictures(2), max_tokens=2)
    spans = engine.scheduler.sequences[request_id].request.atomic_spans
    *_, last = engine.events(request_id)
    assert [span.end - span.start for span in spans] == [16, 16]
    assert all(not span.start < chunk.end < span.end for span in spans for chunk in last.output.chunks)
    planned = engine.plan(last.output.num_prompt_tokens, spans)
    assert (planned.chunk_size, planned.num_chunks) == (16, last.output.num_prompt_chunks)
    assert any("chunk size 5 raised to 16" in adjustment for adjustment in planned.adjustments)
    facts = engine.lane.after_reading(last.output.num_prompt_chunks)
    assert facts.boundary == "any token outside images, which see themselves"
    strict = load_vision("gemma3", lane=lane, chunk_size=5, prefix_cache=False, strict=True)
    with pytest.raises(InvalidSetting, match="Make --chunk-size at least 16"):
        answer(strict)
    assert strict.generate("w1 w2 w3", max_tokens=2).num_prompt_tokens == 3


def test_images_and_placeholders_must_be_as_many(lane, load_vision):
    engine = load_vision("llava", lane=lane)
    empty = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1"}]}]
    with pytest.raises(InvalidMedia, match=r"1 image part\(s\) without an image, and 2"):
        engine.generate(empty, images=pictures(2))
    with pytest.raises(InvalidMedia, match=r"1 image part\(s\) without an image, and 0"):
        engine.generate(empty)
    with pytest.raises(InvalidMedia, match=r"2 image placeholder\(s\) <image> and 1 image"):
        engine.generate(TEXT, images=pictures(1))
    with pytest.raises(InvalidMedia, match="more placeholders than images"):
        engine.generate(TEXT)
    with pytest.raises(InvalidMedia, match="with token ids"):
        engine.generate([1, 2, 3], images=pictures(1))
    assert not engine.scheduler.has_work
    assert engine.model.lane.num_kept == 0
