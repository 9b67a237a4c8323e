"""Prompts with images, cut anywhere: the logits of the whole plain forward, and every image encoded once."""

from __future__ import annotations

import io
from collections import UserDict

import pytest
import torch
from PIL import Image
from tiny_models import prompt, tiny_model
from tiny_vision_models import (
    IMAGE_TOKEN,
    ON_EVERY_LANE,
    count_images,
    gemma3_processor,
    llava_processor,
    pictures,
    processed_prompt,
    tiny_vision_model,
)

from penstock.errors import InvalidMedia, UnsupportedModel
from penstock.foreign.features import FeatureCache, batches, split_media
from penstock.foreign.forward import Cached, CachedForward, read_in_chunks
from penstock.foreign.images import MediaPrompt, media_model
from penstock.foreign.processor import MAX_IMAGE_PIXELS, MediaProcessor, open_image

EXACT = 1e-4
BORDERS = ["inside", "at", "between"]
SEE_THEMSELVES = ("gemma3", "gemma4")


@pytest.fixture(scope="module")
def made():
    """Name -> (model, the processor's output, logits of the whole plain forward), made once."""
    known = {}

    def make(name):
        if name not in known:
            model = tiny_vision_model(name)
            inputs = processed_prompt(name, model)
            with torch.no_grad():
                known[name] = model, inputs, model(**inputs, use_cache=False).logits
        return known[name]

    return make


@torch.no_grad()
def read(media, media_prompt, chunk_limit):
    """(logits of every token, the chunks, the cache)."""
    chunks: list[tuple[int, int, str]] = []
    output = read_in_chunks(
        CachedForward(media.model),
        media_prompt,
        Cached(),
        chunk_limit=chunk_limit,
        num_logit_rows=None,
        on_chunk=lambda start, end, reason: chunks.append((start, end, reason)),
    )
    return output.logits, chunks, output.past_key_values


def image_spans(inputs) -> list[tuple[int, int]]:
    is_image = torch.nn.functional.pad((inputs["input_ids"][0] == IMAGE_TOKEN).long(), (1, 1)).diff()
    starts, ends = (is_image == 1).nonzero().flatten().tolist(), (is_image == -1).nonzero().flatten().tolist()
    return list(zip(starts, ends, strict=True))


# --- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 64])
@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_chunks_give_the_logits_of_the_whole_forward(made, name, chunk_size):
    model, inputs, whole = made(name)
    media = media_model(model)
    logits, chunks, _ = read(media, MediaPrompt.of(media, inputs), lambda start: chunk_size)
    assert float((logits - whole).abs().max()) <= EXACT
    too_large = [chunk for chunk in chunks if chunk[1] - chunk[0] > chunk_size]
    assert all(reason == "whole-span" for _, _, reason in too_large)
    assert bool(too_large) == (name in SEE_THEMSELVES and chunk_size < 16)


@pytest.mark.parametrize("where", BORDERS)
@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_a_border_may_lie_anywhere_about_the_images(made, name, where):
    model, inputs, whole = made(name)
    (first, first_end), (second, _) = image_spans(inputs)
    border = {"inside": first + 2, "at": first_end, "between": (first_end + second) // 2}[where]
    media = media_model(model)
    media_prompt = MediaPrompt.of(media, inputs)
    logits, chunks, _ = read(
        media, media_prompt, lambda start: border - start if start < border else media_prompt.num_tokens
    )
    assert float((logits - whole).abs().max()) <= EXACT
    expected = first if name in SEE_THEMSELVES and where == "inside" else border  # a span that sees itself is not cut
    assert chunks[0][1] == expected


@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_the_logits_depend_on_the_images(made, name):
    """Without this, the tests above would not notice a lost image."""
    model, inputs, whole = made(name)
    media = media_model(model)
    others = dict(inputs, pixel_values=inputs["pixel_values"].flip(-1))
    logits, _, _ = read(media, MediaPrompt.of(media, others), lambda start: 7)
    assert float((logits[:, -1] - whole[:, -1]).abs().max()) > 100 * EXACT


@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_what_is_written_afterwards_is_what_generate_writes(made, name):
    """Greedy, 32 tokens, with the positions that follow the prompt's."""
    model, inputs, _ = made(name)
    reference = model.generate(**inputs, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    media = media_model(model)
    media_prompt = MediaPrompt.of(media, inputs)
    logits, _, cache = read(media, media_prompt, lambda start: 7)
    written = [int(logits[0, -1].argmax())]
    while len(written) < 32:
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([written[-1:]]),
                position_ids=media_prompt.positions_after(media_prompt.num_tokens + len(written) - 1),
                past_key_values=cache,
                use_cache=True,
            )
        written.append(int(output.logits[0, -1].argmax()))
    assert written == reference[0, media_prompt.num_tokens :].tolist()


@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_prompts_without_images_work(made, name):
    model, _, _ = made(name)
    ids = torch.tensor([[token for token in prompt(40) if token < IMAGE_TOKEN]])
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
    media = media_model(model)
    logits, _, _ = read(media, MediaPrompt.of(media, {"input_ids": ids}), lambda start: 7)
    assert float((logits - whole).abs().max()) <= EXACT


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "llava"])
def test_padded_batches_with_images_are_exact(made, name):
    """The second prompt is the first, padded on the left, with its images in the other order."""
    model, inputs, _ = made(name)
    pad = torch.zeros(1, 6, dtype=torch.long)
    rows = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "mm_token_type_ids": 0}
    batch = {
        key: torch.cat([torch.cat([inputs[key], inputs[key][:, -6:]], 1), torch.cat([pad, inputs[key]], 1)])
        for key in rows
        if key in inputs
    }
    batch |= {key: torch.cat([value, value]) for key, value in inputs.items() if key not in rows}
    with torch.no_grad():
        whole = model(**batch, use_cache=False).logits
    media = media_model(model)
    logits, _, _ = read(media, MediaPrompt.of(media, batch), lambda start: 7)
    is_real = batch["attention_mask"].bool()
    assert float((logits - whole)[is_real].abs().max()) <= EXACT


# --- encoding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder_bytes", [1, 2**30], ids=["one by one", "together"])
@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_each_image_is_encoded_once(name, encoder_bytes):
    model = tiny_vision_model(name)
    inputs = processed_prompt(name, model)
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).logits
    encoded = count_images(model, name)
    media = media_model(model)
    media_prompt = MediaPrompt.of(media, inputs, encoder_bytes=encoder_bytes)
    logits, _, _ = read(media, media_prompt, lambda start: 3)
    assert float((logits - whole).abs().max()) <= EXACT
    assert sum(encoded) == 2
    assert len(encoded) == (2 if encoder_bytes == 1 else 1)

    MediaPrompt.of(media, inputs)
    assert sum(encoded) == 2, "the same images came again and are known"


def test_an_image_that_comes_twice_is_encoded_once(made):
    _, inputs, _ = made("llava")
    media = media_model(tiny_vision_model("llava"))
    encoded = count_images(media.model, "llava")
    twice = dict(inputs, pixel_values=inputs["pixel_values"][:1].repeat(2, 1, 1, 1))
    assert MediaPrompt.of(media, twice).features.num_rows == 32
    assert sum(encoded) == 1


def test_batches_stay_within_the_budget_or_hold_one_image(made):
    model, _, _ = made("llava")
    tower = media_model(model).tower
    many = split_media(tower, {"pixel_values": torch.randn(9, 3, 32, 32)})
    budget = tower.call_bytes(many[:4])
    assert [len(batch) for batch in batches(tower, many, budget)] == [4, 4, 1]
    assert [len(batch) for batch in batches(tower, many, 1)] == [1] * 9


def test_features_leave_when_there_are_too_many_bytes(made):
    model, inputs, _ = made("llava")
    media = media_model(model)
    features = MediaPrompt.of(media, inputs).features
    cache = FeatureCache(max_bytes=2 * features.num_bytes)
    for _ in range(3):
        cache.put(b"twice", features)
    assert cache.num_bytes == features.num_bytes, "what is replaced is not counted any more"
    cache = FeatureCache(max_bytes=2 * features.num_bytes)
    for key in (b"one", b"two"):
        cache.put(key, features)
    assert cache.get(b"one") is not None
    cache.put(b"three", features)
    assert cache.get(b"two") is None
    assert cache.get(b"one") is not None
    assert cache.num_bytes <= cache.max_bytes


def test_a_text_model_is_not_a_media_model():
    assert media_model(tiny_model("llama")) is None


# --- bad input ----------------------------------------------------------------------------------------------


def test_more_images_than_placeholders_and_the_reverse_are_refused(made):
    model, inputs, _ = made("llava")
    media = media_model(model)
    with pytest.raises(InvalidMedia, match="more placeholders than images"):
        MediaPrompt.of(media, dict(inputs, pixel_values=inputs["pixel_values"][:1]))
    few = inputs["input_ids"].clone()
    few[few == IMAGE_TOKEN] = 5
    with pytest.raises(InvalidMedia, match="more images than placeholders"):
        MediaPrompt.of(media, dict(inputs, input_ids=few))


def test_videos_are_refused(made):
    model, inputs, _ = made("qwen2.5-vl")
    with pytest.raises(InvalidMedia, match="pixel_values_videos"):
        MediaPrompt.of(media_model(model), inputs | {"pixel_values_videos": torch.zeros(1)})


def test_what_is_not_an_image_is_refused(tmp_path):
    text = tmp_path / "notes.png"
    text.write_text("not an image")
    with pytest.raises(InvalidMedia, match=r"image 2 .*notes.png.* is not an image"):
        open_image(text, name="image 2")
    with pytest.raises(InvalidMedia, match="does not exist"):
        open_image(tmp_path / "nowhere.png")
    with pytest.raises(InvalidMedia, match="is not an image"):
        open_image(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(InvalidMedia, match="is not an image"):
        open_image(42)


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(tmp_path):
    side = int(MAX_IMAGE_PIXELS**0.5) + 1
    path = tmp_path / "large.png"
    Image.new("1", (side, side)).save(path)
    with pytest.raises(InvalidMedia, match=rf"has {side} x {side} pixels; the limit is 64 megapixels"):
        open_image(path)


def test_paths_bytes_and_images_are_opened(tmp_path):
    picture = Image.new("L", (4, 3), color=7)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(buffer.getvalue())
    for source in (picture, path, str(path), buffer.getvalue()):
        image = open_image(source)
        assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 3), (7, 7, 7))


# --- processors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "make"), [("llava", llava_processor), ("gemma3", gemma3_processor)])
def test_from_text_and_pictures_to_exact_logits(made, name, make):
    model, _, _ = made(name)
    inputs = MediaProcessor(make()).inputs("w1 w2 <image> w3 <image> w4 w5 w6", pictures(2))
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).logits
    media = media_model(model)
    logits, _, _ = read(media, MediaPrompt.of(media, inputs), lambda start: 7)
    assert float((logits - whole).abs().max()) <= EXACT


@pytest.mark.parametrize(("text", "num_images"), [("w1 <image> w2", 2), ("w1 <image> <image> w2", 1), ("w1", 1)])
def test_placeholders_are_counted_before_the_processor_runs(text, num_images):
    with pytest.raises(InvalidMedia, match=r"image placeholder\(s\) <image> and \d image\(s\)"):
        MediaProcessor(llava_processor()).inputs(text, pictures(num_images))


def test_processors_are_called_with_what_they_take_and_any_mapping_is_accepted():
    class Plain:
        def __call__(self, text, images=None):
            return UserDict({"input_ids": torch.tensor([[len(text[0])]]), "num_images": len(images or [])})

    assert MediaProcessor(Plain()).inputs("abc", pictures(1)) == {"input_ids": torch.tensor([[3]]), "num_images": 1}


def test_processors_that_cannot_serve_are_refused():
    with pytest.raises(UnsupportedModel, match="cannot be called"):
        MediaProcessor(object())
    with pytest.raises(UnsupportedModel, match="does not take text and images"):
        MediaProcessor(lambda text: text)
    with pytest.raises(InvalidMedia, match="returned a list"):
        MediaProcessor(lambda text, images=None: [1]).inputs("abc")


def test_what_a_processor_raises_becomes_one_sentence():
    def strict(text, images=None):
        raise ValueError("image is\n  too small")

    with pytest.raises(InvalidMedia, match=r"refused the prompt with 1 image\(s\): image is too small"):
        MediaProcessor(strict).inputs("abc", pictures(1))
