"""Image-text models through the engine: any chunks give plain transformers' answer, and each image is encoded once."""

import asyncio
import dataclasses
import json
import shutil
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import transformers
from image_answers import EXACT, SAMPLING, SETTINGS, answer, finished, plain
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT
from logit_recorder import LogitRecorder
from penstock_command import penstock_text
from tiny_models import prompt, save_tiny_model, save_tokenizer
from tiny_seq2seq import save_tiny_seq2seq
from tiny_vision_models import IMAGE_TOKEN, ON_EVERY_LANE, TEXT, TensorProcessor, count_images, pictures, plain_inputs

from penstock.config import EngineConfig
from penstock.doctor.examination import examine
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.engine.planning import plan
from penstock.errors import (
    InvalidMedia,
    InvalidPrompt,
    MemoryTooSmall,
    PromptTooLong,
    UnknownLane,
    UnsupportedModel,
)
from penstock.foreign.processor import MediaProcessor
from penstock.lanes.table import pick_lane
from penstock.proof.images import NOT_PACKED, check_picture
from penstock.proof.verdict import Verdict, Way, save_verdict, verdict_key
from penstock.request import Failed, Finished, Token

pytestmark = pytest.mark.usefixtures("own_verdicts")


@pytest.fixture
def load(load_vision):
    return partial(load_vision, lane=GENERIC_MULTIMODAL)


# --- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_sizes", [(3, 64), pytest.param((1, 7, 0), marks=pytest.mark.evidence)], ids=str)
@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_any_chunks_give_the_answer_of_plain_transformers(name, chunk_sizes, tiny_vision, load):
    model = tiny_vision(name)[1]
    written, reference = plain(model, plain_inputs(name, model))
    for chunk_size in chunk_sizes:
        engine = load(name, chunk_size=chunk_size)
        recorder = LogitRecorder(engine)
        output = answer(engine)
        assert output.token_ids == written, f"chunk size {chunk_size}"
        assert float((recorder.all - reference).abs().max()) <= EXACT, f"chunk size {chunk_size}"
        facts = engine.lane.after_reading(output.num_prompt_chunks)
        assert facts.id == GENERIC_MULTIMODAL
        assert facts.applied == (0 < chunk_size < output.num_prompt_tokens)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_a_stream_goes_on_while_images_are_encoded(name, load):
    """Each picture is a call of the tower, each call has a step, and each of these steps writes a token."""
    expected = answer(load(name)).token_ids
    engine = load(name)
    engine.model.lane.encoder_bytes = 1
    stream = engine.submit([5, 6, 7], **SAMPLING)
    engine.step()
    encoded = count_images(engine.model.lane.model, name)
    asked = engine.submit(TEXT, images=pictures(2), **SAMPLING)
    assert encoded == [], "nothing is encoded while a request is taken in"
    for number in (1, 2):
        written = [event.token_id for event in engine.step() if isinstance(event, Token) and event.request_id == stream]
        assert (len(encoded), len(written)) == (number, 1)
    of_stream, of_images = finished(engine, [stream, asked])
    assert of_images.token_ids == expected
    assert of_images.num_prompt_tokens > of_stream.num_prompt_tokens


def test_images_that_do_not_fit_their_placeholders_fail_their_own_request_alone(load, tiny_vision):
    """A processor that says nothing of placeholders: the mistake shows once the images are encoded."""
    engine = load("llava")
    inputs = plain_inputs("llava", tiny_vision("llava")[1])
    cut = {
        name: tensor[:, 3:] if name in ("input_ids", "attention_mask") else tensor for name, tensor in inputs.items()
    }
    engine.model.lane.processor = MediaProcessor(TensorProcessor(cut))
    stream = engine.submit([5, 6, 7], max_tokens=3, ignore_eos=True)
    asked = engine.submit(TEXT, images=pictures(2), max_tokens=3)
    events = [event for _ in range(5) for event in engine.step()]
    assert [event.request_id for event in events if isinstance(event, Failed)] == [asked]
    assert [len(event.output.token_ids) for event in events if isinstance(event, Finished)] == [0, 3]
    assert stream not in engine.scheduler.sequences
    assert not engine.scheduler.has_work


def test_a_failed_step_is_made_good(load):
    expected = answer(load("llava", chunk_size=7)).token_ids
    engine = load("llava", chunk_size=7)
    request_id = engine.submit(TEXT, images=pictures(2), **SAMPLING)
    engine.step()
    engine.step()

    def fail(module, arguments):
        raise RuntimeError("the card fell off")

    last_layer = engine.model.lane.media.language_model.layers[-1]
    handle = last_layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="fell off"):
        engine.step()
    handle.remove()
    *_, last = engine.events(request_id)
    assert last.output.token_ids == expected


def test_an_abort_in_the_middle_of_the_prompt_frees_everything(load):
    engine = load("gemma3", chunk_size=3)
    request_id = engine.submit(TEXT, images=pictures(2), max_tokens=4)
    engine.step()
    engine.step()
    assert engine.model.lane.num_kept == 1
    engine.abort(request_id)
    assert engine.model.lane.num_kept == 0
    assert not engine.scheduler.has_work
    engine.scheduler.check()
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks


def test_the_async_engine_takes_images(load):
    expected = answer(load("llava", chunk_size=7)).token_ids

    async def ask():
        engine = AsyncEngine(load("llava", chunk_size=7))
        try:
            return await engine.generate(TEXT, images=pictures(2), **SAMPLING)
        finally:
            await engine.close()

    assert asyncio.run(ask()).token_ids == expected


def test_a_model_whose_whole_prompt_sees_itself_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(vocab_size=199, head_dim=16, num_key_value_heads=2, **sizes),
        vision_config=transformers.SiglipVisionConfig(image_size=32, patch_size=8, projection_dim=64, **sizes),
        projection_dim=64,
        image_token_id=IMAGE_TOKEN,
    )
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    tokens = [token for token in prompt(40) if token < IMAGE_TOKEN]
    written, reference = plain(model, {"input_ids": torch.tensor([tokens])})
    with Engine.load(str(tmp_path), **SETTINGS, chunk_size=7) as engine:
        recorder = LogitRecorder(engine)
        output = engine.generate(tokens, **SAMPLING)
        assert output.num_prompt_chunks == 1
        assert output.token_ids == written
        assert float((recorder.all - reference).abs().max()) <= EXACT
        assert "the whole prompt sees itself" in engine.lane.reason
        assert any("read whole" in adjustment for adjustment in engine.adjustments)


# --- messages -----------------------------------------------------------------------------------------------


def test_images_in_messages_go_where_their_parts_are(load, tmp_path):
    engine = load("llava", chunk_size=7)
    one, two = pictures(2)
    path = tmp_path / "two.png"
    two.save(path)
    content = [{"type": "image", "image": one}, {"type": "text", "text": "w1 w2"}, {"type": "image", "image": path}]
    empty = [{"type": "image"}, {"type": "text", "text": "w1 w2"}, {"type": "image"}]
    as_text = "user <image> w1 w2 <image> w9"
    written = engine.generate(as_text, images=[one, two], max_tokens=8).token_ids
    assert engine.generate([{"role": "user", "content": content}], max_tokens=8).token_ids == written
    bytes_of_two = path.read_bytes()
    filled = engine.generate([{"role": "user", "content": empty}], images=[one, bytes_of_two], max_tokens=8)
    assert filled.token_ids == written
    swapped = engine.generate([{"role": "user", "content": empty}], images=[two, one], max_tokens=8)
    assert swapped.token_ids != written


def test_images_beside_plain_messages_come_first_in_the_last_user_message(load):
    engine = load("llava")
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w1 w2"}]
    written = engine.generate("system w3 user <image> w1 w2 w9", images=pictures(1), max_tokens=8).token_ids
    assert engine.generate(messages, images=pictures(1), max_tokens=8).token_ids == written


def test_messages_without_images_are_rendered_by_the_same_template(load):
    engine = load("llava")
    written = engine.generate("user w1 w2 w9", max_tokens=8).token_ids
    assert engine.generate([{"role": "user", "content": "w1 w2"}], max_tokens=8).token_ids == written


# --- prefixes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_what_came_before_is_found_in_pages_of_text_and_of_images(name, load):
    """Of text all but the last block; of images what has the same pictures."""
    one, two, three = pictures(3)
    fresh, engine = load(name, prefix_cache=False), load(name, chunk_size=7, block_size=4)
    tokens = prompt(61)
    for asked in (tokens, [*tokens[:40], *prompt(9)]):
        output = engine.generate(asked, **SAMPLING)
        assert output.token_ids == fresh.generate(asked, **SAMPLING).token_ids
    assert output.num_cached_tokens == 40
    expected = [answer(fresh, given).token_ids for given in ([one, two], [one, three])]
    assert answer(engine, [one, two]).num_cached_tokens < 8
    again, other = answer(engine, [one, two]), answer(engine, [one, three])
    assert again.num_cached_tokens >= again.num_prompt_tokens - 4
    assert 0 < other.num_cached_tokens < again.num_cached_tokens
    assert [again.token_ids, other.token_ids] == expected


# --- the lane, the plan and the self-check -------------------------------------------------------------------


def test_the_table_gives_image_text_models_their_lane(tiny_vision):
    config = json.loads((tiny_vision("llava")[0] / "config.json").read_text())
    assert pick_lane(config | {"model_type": "llava_next"}, None).id == GENERIC_MULTIMODAL
    assert pick_lane(config, GENERIC_MULTIMODAL).reason.endswith("asked for by --lane")
    with pytest.raises(UnknownLane, match="no causal language model"):
        pick_lane(config, GENERIC_TEXT)
    with pytest.raises(UnknownLane, match="reads no images"):
        pick_lane({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, GENERIC_MULTIMODAL)
    with pytest.raises(UnsupportedModel, match="auto_map"):
        pick_lane(config | {"auto_map": {"AutoModel": "code.Model"}}, None)


def test_a_plan_counts_the_tower_the_features_and_the_encoder(tiny_vision):
    folder, model = tiny_vision("llava")
    planned = plan(str(folder), prompt_tokens=500, memory="4GiB", dtype="float32", lane=GENERIC_MULTIMODAL)
    assert planned.lane.id == GENERIC_MULTIMODAL
    assert planned.prompt.weight_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < planned.prompt.media_bytes < 2**30
    text = model.config.get_text_config()
    keys_and_values = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    assert planned.prompt.kv_bytes >= 500 * (keys_and_values + text.hidden_size * 4)


def test_the_check_of_the_first_load_is_kept_and_says_what_it_measured(load, tiny_vision):
    reason = load("gemma3").lane.reason
    assert "exact (own-cache): chunked logits of text agree with the whole prompt's to" in reason
    assert "a picture's logits in chunks agree with the whole prompt's to" in reason
    planned = plan(
        str(tiny_vision("gemma3")[0]), prompt_tokens=50, memory="4GiB", dtype="float32", lane=GENERIC_MULTIMODAL
    )
    assert "a picture's logits in chunks agree with the whole prompt's to" in planned.lane.reason


def test_narrow_weights_are_held_to_float32_and_the_verdict_is_kept(tiny_vision):
    folder = str(tiny_vision("llava")[0])
    settings = EngineConfig(dtype="bfloat16", device="cpu", lane=GENERIC_MULTIMODAL)
    examined = examine(folder, settings)
    assert examined.verdict.exact
    assert examined.verdict.picture is None, "doctor loads no weights"
    with Engine.load(folder, dtype="bfloat16", device="cpu", memory="4GiB", threads=1, lane=GENERIC_MULTIMODAL):
        verdict = examine(folder, settings).verdict
    assert verdict.picture.exact
    assert verdict.real_weights.exact
    assert "in bfloat16, chunks are" in verdict.real_weights.reason


def test_a_model_that_forgets_between_chunks_is_noticed(load):
    lane = load("llava").model.lane

    def forget(module, args, kwargs):
        return args, kwargs | {"past_key_values": None}

    handle = lane.media.language_model.register_forward_pre_hook(forget, with_kwargs=True)
    found = check_picture(lane)
    handle.remove()
    assert not found.exact
    assert check_picture(lane).exact


def test_a_model_whose_check_failed_is_read_whole_and_says_so(tiny_vision, load, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, model = tiny_vision("llava")
    config = json.loads((folder / "config.json").read_text())
    key = verdict_key(config, dtype="float32", lane=GENERIC_MULTIMODAL, backend="cpu")
    verdict = Verdict(exact=False, max_difference=0.5, reason="off by 0.5", way=Way.OWN_CACHE, packing=NOT_PACKED)
    save_verdict(key, verdict)
    engine = load("llava", chunk_size=3)
    output = answer(engine)
    assert output.num_prompt_chunks == 1
    assert output.token_ids == plain(model, plain_inputs("llava", model))[0]
    assert not engine.lane.after_reading(1).applied
    assert any(
        "prompts are read whole" in adjustment and "off by 0.5" in adjustment for adjustment in engine.adjustments
    )
    with pytest.raises(UnsupportedModel, match="--strict"):
        load("llava", strict=True)


# --- bad input ----------------------------------------------------------------------------------------------


def test_media_given_to_a_text_model_are_refused(tmp_path):
    save_tiny_model("llama", tmp_path / "text")
    save_tiny_seq2seq("t5", tmp_path / "t5")
    part = {"role": "user", "content": [{"type": "image", "image": pictures(1)[0]}]}
    for folder, lane in (("text", None), ("text", GENERIC_TEXT), ("t5", None)):
        with Engine.load(str(tmp_path / folder), lane=lane, **SETTINGS) as engine:
            for given in ({"prompt": "w1", "images": pictures(1)}, {"prompt": [part]}):
                with pytest.raises(
                    InvalidMedia, match=rf"1 image\(s\) given; .* {engine.lane.id}, which reads text only"
                ):
                    engine.generate(**given)


def test_parts_and_images_that_cannot_be_read_are_refused(load, tmp_path):
    engine = load("llava")
    (tmp_path / "notes.png").write_text("not an image")
    with pytest.raises(InvalidMedia, match=r"notes\.png.* is not an image"):
        engine.generate("w1 <image>", images=[tmp_path / "notes.png"])
    with pytest.raises(InvalidMedia, match="'video'"):
        engine.generate([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])
    with pytest.raises(InvalidPrompt, match="content of a message is a int"):
        engine.generate([{"role": "user", "content": 7}])
    with pytest.raises(InvalidPrompt, match="empty"):
        engine.generate("")


def test_an_image_that_the_encoder_has_no_memory_for_is_refused(load):
    loaded = load("llava")
    loaded.model.lane.encoder_bytes = 1000
    engine = Engine(dataclasses.replace(loaded.model, budget_bytes=0))
    with pytest.raises(MemoryTooSmall, match=r"Encoding image 1 \(16 patches\) takes"):
        answer(engine)


def test_a_folder_without_a_processor_reads_text_and_says_why_not_images(tiny_vision):
    folder, _ = tiny_vision("qwen2.5-vl")
    settings = SETTINGS | {"lane": GENERIC_MULTIMODAL}
    with Engine.load(str(folder), **settings) as engine:
        assert len(engine.generate("w1 w2 w3", max_tokens=2, ignore_eos=True).token_ids) == 2
        with pytest.raises(InvalidMedia, match=r"2 image\(s\) given, and they cannot be read: .* gives no processor"):
            answer(engine)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_says_how_to_get_it(tiny_vision, tmp_path):
    shutil.copytree(tiny_vision("qwen2.5-vl")[0], tmp_path, dirs_exist_ok=True)
    kinds = {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(kinds))
    with Engine.load(str(tmp_path), **SETTINGS) as engine:
        assert engine.generate("w1 w2 w3", max_tokens=2, ignore_eos=True).token_ids
        with pytest.raises(InvalidMedia, match="needs torchvision, which is not installed; pip install torchvision"):
            answer(engine)


def test_what_is_too_long_is_refused_before_it_is_encoded(load):
    engine = load("llava", context=30)
    encoded = count_images(engine.model.lane.model, "llava")
    with pytest.raises(PromptTooLong, match="the context holds 30"):
        answer(engine)
    assert not encoded


# --- the command line ---------------------------------------------------------------------------------------


def test_run_takes_images_between_files_and_the_text(tiny_vision, tmp_path):
    folder, model = tiny_vision("llava")
    one, two = pictures(2)
    one.save(tmp_path / "one.png")
    two.save(tmp_path / "two.png")
    (tmp_path / "notes.txt").write_text("w3 w4")
    images = ["--image", tmp_path / "one.png", "--image", tmp_path / "two.png"]
    done = penstock_text(
        *["run", folder, *images, "-p", "w1 w2", "-f", tmp_path / "notes.txt", "--json", "--chunk-size", 7],
        *["--max-tokens", 8, "--dtype", "float32", "--memory", "4GiB", "--lane", GENERIC_MULTIMODAL],
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = " user w3 w4 <image>  <image>  w1 w2 w9"
    written, _ = plain(model, processor(text=[text], images=[one, two], return_tensors="pt"), 8)
    assert tuple(document["token_ids"]) == written
    assert document["lane"]["id"] == GENERIC_MULTIMODAL
    assert document["lane"]["applied"]
    assert not any("prefix cache is off" in adjustment for adjustment in document["plan"]["adjustments"])


def test_chat_shows_its_images_with_the_first_message(tiny_vision, tmp_path):
    folder, model = tiny_vision("llava")
    one = pictures(1)[0]
    one.save(tmp_path / "one.png")
    arguments = [folder, "--image", tmp_path / "one.png", "--max-tokens", 8, "--dtype", "float32", "--memory", "4GiB"]
    done = penstock_text("chat", *arguments, stdin="w1 w2\n\n")
    assert done.returncode == 0, done.stderr
    processor = transformers.AutoProcessor.from_pretrained(folder)
    inputs = processor(text=[" user <image>  w1 w2 w9"], images=[one], return_tensors="pt")
    length = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = model.generate(**inputs, **length)[0, inputs["input_ids"].shape[1] :]
    text = processor.tokenizer.decode(written, skip_special_tokens=True)
    assert [word for word in done.stdout.split() if word.startswith("w")] == text.split()


@pytest.mark.parametrize(
    ("command", "name"),
    [("run", "notes.png"), ("run", "nowhere.png"), ("run", "text-model.png"), ("chat", "nowhere.png")],
)
def test_images_are_refused_in_one_sentence(tiny_vision, tmp_path, name, command):
    """One that is not an image, one that is not there, and one for a model that reads text only."""
    (tmp_path / "notes.png").write_text("not an image")
    folder = tiny_vision("llava")[0]
    if name == "text-model.png":
        pictures(1)[0].save(tmp_path / name)
        folder = tmp_path / name.removesuffix(".png")
        save_tiny_model("llama", folder)
    question = ["-p", "w1"] if command == "run" else []
    stdin = "" if command == "run" else "w1\n"
    done = penstock_text(command, folder, "--image", tmp_path / name, *question, "--memory", "4GiB", stdin=stdin)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().count("\n") == 0
    assert ("reads text only" if name == "text-model.png" else name) in done.stderr
