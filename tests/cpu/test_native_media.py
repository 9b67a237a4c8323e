"""Our decoder with the tower of transformers: any chunks give plain transformers' answer, and the prefix cache knows
which images it saw."""

import json
import shutil

import pytest
import torch
import transformers
from image_answers import EXACT, NUM_GENERATED, SETTINGS, answer, finished, plain
from lane_ids import GENERIC_MULTIMODAL, NATIVE_MULTIMODAL
from logit_recorder import LogitRecorder
from penstock_command import penstock_text
from safetensors.torch import load_file, save_file
from tiny_vision_models import IMAGE_TOKEN, KINDS, TEXT, pictures, plain_inputs, save_with_joined_experts

from penstock.engine.engine import Engine
from penstock.engine.planning import plan
from penstock.errors import InvalidModelFile, InvalidSetting, UnknownLane
from penstock.foreign.images import MediaPrompt
from penstock.lanes.table import pick_lane
from penstock.models.media_spec import NATIVE_MEDIA
from penstock.request import Failed, Finished

pytestmark = pytest.mark.usefixtures("own_verdicts")


# --- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk_sizes", [(3, 64, 0), pytest.param((1, 2, 5, 7, 8, 16), marks=pytest.mark.evidence)], ids=str
)
@pytest.mark.parametrize("name", KINDS)
def test_any_chunks_give_the_answer_of_plain_transformers_on_our_lane(name, chunk_sizes, tiny_vision, load_vision):
    """Chunks of one and three end inside images, at their borders and between them; 64 holds several parts."""
    model = tiny_vision(name)[1]
    written, reference = plain(model, plain_inputs(name, model))
    for chunk_size in chunk_sizes:
        engine = load_vision(name, chunk_size=chunk_size)
        recorder = LogitRecorder(engine)
        output = answer(engine)
        assert output.token_ids == written, f"chunk size {chunk_size}"
        assert float((recorder.all - reference).abs().max()) <= EXACT, f"chunk size {chunk_size}"
        facts = engine.lane.after_reading(output.num_prompt_chunks)
        assert facts.id == NATIVE_MULTIMODAL
        assert facts.applied == (0 < chunk_size < output.num_prompt_tokens)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl", "gemma3"])
def test_a_border_at_every_token_gives_the_same_logits(name, load_vision):
    """Two chunks, the first of every length: borders before, in, after and between the images."""
    engine = load_vision(name, chunk_size=0, prefix_cache=False)
    recorder = LogitRecorder(engine)
    num_tokens = answer(engine, max_tokens=1).num_prompt_tokens
    whole = recorder.all
    for border in range(1, num_tokens):
        engine.scheduler.budget.ceiling = border
        request_id = engine.submit(TEXT, images=pictures(2), max_tokens=1)
        spans = engine.scheduler.sequences[request_id].request.atomic_spans
        engine.step()
        engine.scheduler.budget.ceiling = 0
        *_, last = engine.events(request_id)
        cuts = [chunk.end for chunk in last.output.chunks]
        assert all(not span.start < cut < span.end for span in spans for cut in cuts)
        assert spans or cuts == [border, num_tokens]
        assert float((recorder.steps[-1] - whole).abs().max()) <= EXACT, f"border {border}"


def test_log_probabilities_of_images_are_refused_before_they_are_encoded(load_vision):
    engine = load_vision("llava", chunk_size=7)
    with pytest.raises(InvalidSetting, match="have no log-probabilities"):
        engine.submit(TEXT, images=pictures(2), prompt_logprobs=0)
    assert not engine.scheduler.has_work


def test_an_image_that_the_tower_cannot_encode_fails_alone(load_vision):
    """A tower that runs out of memory, say, ends the request that asked, and no other."""
    engine = load_vision("llava", chunk_size=7)
    tower = engine.model.lane.media.tower

    def fail(**inputs):
        raise RuntimeError("out of memory")

    others = engine.submit([5, 6, 7], max_tokens=3, ignore_eos=True)
    asked = engine.submit(TEXT, images=pictures(2), max_tokens=3)
    object.__setattr__(tower, "encode", fail)
    events = []
    while engine.scheduler.has_work:
        events += engine.step()
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.request_id, "out of memory" in str(event.error)) for event in failed] == [(asked, True)]
    ended = {event.request_id: event.output.finish_reason for event in events if isinstance(event, Finished)}
    assert ended == {others: "length", asked: "abort"}


def test_an_image_wider_than_a_query_tile_and_a_window_is_read_exactly(tiny_vision):
    """A span that sees itself is cut into tiles of queries and of keys, and their last tile may be one row."""
    from penstock.attention import cpu

    model = tiny_vision("gemma3")[1]
    written, reference = plain(model, plain_inputs("gemma3", model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "KEY_ROWS", 5)
        for rows in (1, 3, 5, 15):
            patch.setattr(cpu, "QUERY_ROWS", rows)
            with Engine.load(str(tiny_vision("gemma3")[0]), **SETTINGS, chunk_size=0) as engine:
                recorder = LogitRecorder(engine)
                assert answer(engine).token_ids == written
                assert float((recorder.all - reference).abs().max()) <= EXACT


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_overlap_recomputes_tokens_of_images_in_place(name, load_vision):
    expected = answer(load_vision(name, chunk_size=7)).token_ids
    assert answer(load_vision(name, chunk_size=7, overlap=3, prefix_cache=False)).token_ids == expected


def test_every_native_family_has_a_tiny_model_here():
    """Each test over them fails where a family falls to another lane."""
    assert {KINDS[name].config().model_type for name in KINDS} == set(NATIVE_MEDIA)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_requests_beside_each_other_keep_their_own_states(name, tiny_vision, load_vision):
    """A picture's prompt in chunks of three, beside text and beside another picture in the same place."""
    engine = load_vision(name, chunk_size=3)
    alone = [answer(load_vision(name), images, max_tokens=6).token_ids for images in (pictures(2), pictures(3)[1:])]
    sampling = {"max_tokens": 6, "ignore_eos": True}
    asked = [engine.submit(TEXT, images=images, **sampling) for images in (pictures(2), pictures(3)[1:])]
    text = engine.submit([5, 6, 7, 8], **sampling)
    assert [output.token_ids for output in finished(engine, [*asked, text])[:2]] == alone


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "qwen3.5-moe"])
def test_experts_that_lie_in_one_tensor_are_read_as_those_that_lie_apart(name, tiny_vision, tmp_path):
    """Published checkpoints have them joined: of Qwen3.5 with outputs first, of Qwen3-VL with inputs first."""
    folder, model = tiny_vision(name)
    save_with_joined_experts(folder, tmp_path, inputs_first=name == "qwen3-vl-moe")
    model = type(model).from_pretrained(tmp_path).eval()
    tokens = list(range(3, 60))
    written, reference = plain(model, {"input_ids": torch.tensor([tokens])}, 2)
    for settings in ({"text_only": True}, {"text_only": False}):
        with Engine.load(str(tmp_path), **SETTINGS, **settings, chunk_size=7) as engine:
            recorder = LogitRecorder(engine)
            assert engine.generate(tokens, max_tokens=2, ignore_eos=True).token_ids == written
            assert float((recorder.all[0] - reference[0]).abs().max()) <= EXACT


def test_layers_that_guess_ahead_are_neither_read_nor_counted(tiny_vision, tmp_path):
    folder, _ = tiny_vision("qwen3.5")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    guessing = {f"mtp.layers.0.{part}.weight": torch.ones(64, 64) for part in ("self_attn.o_proj", "fc")}
    save_file(tensors | guessing, tmp_path / "model.safetensors")
    settings = {"prompt_tokens": 100, **SETTINGS, "text_only": False}
    assert plan(str(tmp_path), **settings).prompt == plan(str(folder), **settings).prompt
    with (
        Engine.load(str(tmp_path), **SETTINGS, text_only=False) as engine,
        Engine.load(str(folder), **SETTINGS, text_only=False) as other,
    ):
        asked = {"max_tokens": 4, "ignore_eos": True}
        assert engine.generate([5, 6, 7], **asked).token_ids == other.generate([5, 6, 7], **asked).token_ids


# --- prefixes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_same_images_are_a_prefix_hit_and_others_are_not(name, load_vision):
    """Placeholders have one id whatever they stand for; the second image differs only after the first."""
    one, two, three = pictures(3)
    engine = load_vision(name, chunk_size=7, block_size=4)
    fresh = load_vision(name, prefix_cache=False)
    recorder = LogitRecorder(fresh)
    first, second = answer(fresh, [one, two]), answer(fresh, [three, two])
    theirs, others = recorder.all.split(NUM_GENERATED)
    assert float((theirs - others).abs().max()) > 1e-2
    assert answer(engine, [one, two]).num_cached_tokens == 0
    again = answer(engine, [one, two])
    is_hybrid = engine.model.spec.recurrent is not None  # which goes on from a checkpoint of its states
    assert again.num_cached_tokens >= again.num_prompt_tokens - (28 if is_hybrid else 4)
    assert again.token_ids == first.token_ids
    other = answer(engine, [three, two])
    assert other.num_cached_tokens < 16, "at most what comes before the first image"
    assert other.token_ids == second.token_ids


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_images_that_differ_late_share_what_comes_before(name, load_vision):
    one, two, three = pictures(3)
    engine = load_vision(name, chunk_size=7, block_size=4)
    answer(engine, [one, two])
    output = answer(engine, [one, three])
    assert 16 <= output.num_cached_tokens < 32, "the first image is shared, the second is not"
    assert output.token_ids == answer(load_vision(name), [one, three]).token_ids


def test_touching_images_that_see_each_other_are_one_span_of_the_hash(load_vision):
    """The keys of the first image depend on the second, which it sees."""
    media = load_vision("gemma3").model.lane.media
    ids = torch.tensor([[1, 2, *[IMAGE_TOKEN] * 32, 3]])
    touching = MediaPrompt.of(media, {"input_ids": ids, **KINDS["gemma3"].images()})
    assert [(key.start, key.end) for key in touching.keys] == [(2, 34), (2, 34)]
    ids = torch.tensor([[1, 2, *[IMAGE_TOKEN] * 16, 3, *[IMAGE_TOKEN] * 16]])
    apart = MediaPrompt.of(media, {"input_ids": ids, **KINDS["gemma3"].images()})
    assert [(key.start, key.end) for key in apart.keys] == [(2, 18), (19, 35)]
    assert [key.key for key in apart.keys] == [key.key for key in touching.keys]
    assert len({key.key for key in apart.keys}) == 2


# --- the lane table, the plan, loading ------------------------------------------------------------------------


def test_the_native_lane_is_preferred_where_it_is_eligible(tiny_vision):
    config = json.loads((tiny_vision("llava")[0] / "config.json").read_text())
    assert pick_lane(config, None).id == NATIVE_MULTIMODAL
    assert pick_lane(config, GENERIC_MULTIMODAL).id == GENERIC_MULTIMODAL
    foreign = config | {"text_config": config["text_config"] | {"model_type": "gpt_neox"}}
    assert pick_lane(foreign, None).id == GENERIC_MULTIMODAL
    with pytest.raises(UnknownLane, match="gpt_neox, which is not native"):
        pick_lane(foreign, NATIVE_MULTIMODAL)
    with pytest.raises(UnknownLane, match="reads no images"):
        pick_lane({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, NATIVE_MULTIMODAL)


@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_a_plan_counts_the_tower_the_features_and_the_encoder(name, tiny_vision):
    folder, model = tiny_vision(name)
    planned = plan(str(folder), prompt_tokens=500, memory="4GiB", dtype="float32", text_only=False)
    assert planned.lane.id == NATIVE_MULTIMODAL
    assert planned.prompt.weight_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < planned.prompt.media_bytes < 2**30
    assert not planned.prompt.adjustments
    text = model.config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys_and_values = 2 * text.num_hidden_layers * text.num_key_value_heads * head_size * 4
    num_layers_with_features = 3 if name == "qwen3-vl" else 1
    per_token = keys_and_values + num_layers_with_features * text.hidden_size * 4
    assert planned.prompt.kv_bytes == 512 * per_token


def test_a_config_that_leaves_sizes_to_the_library_is_completed_by_it(tiny_vision, tmp_path):
    """Published configs of LLaVA name no hidden_size, and those of Qwen2.5-VL have no text_config at all."""
    folder = tiny_vision("llava")[0]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    whole = plan(str(tmp_path), prompt_tokens=100, memory="4GiB", dtype="float32").prompt
    del config["text_config"]["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(str(tmp_path), prompt_tokens=100, memory="4GiB", dtype="float32").prompt == whole
    with Engine.load(str(tmp_path), **SETTINGS) as engine, Engine.load(str(folder), **SETTINGS) as other:
        assert engine.lane.id == NATIVE_MULTIMODAL
        assert answer(engine).token_ids == answer(other).token_ids


def test_the_tower_holds_no_second_copy_of_the_decoder(load_vision):
    engine = load_vision("llava")
    lane = engine.model.lane
    assert not any("language_model.layers" in name for name, _ in lane.model.named_parameters())
    assert not any("embed_tokens" in name or "lm_head" in name for name, _ in lane.model.named_parameters())


def test_a_checkpoint_without_a_decoder_is_refused(tiny_vision, tmp_path):
    folder = tiny_vision("llava")[0]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModelFile, match="a text decoder has one"):
        Engine.load(str(tmp_path), **SETTINGS)


# --- the command line ---------------------------------------------------------------------------------------


def test_run_reads_images_in_chunks_of_seven(tiny_vision, tmp_path):
    folder, model = tiny_vision("llava")
    one, two = pictures(2)
    one.save(tmp_path / "one.png")
    two.save(tmp_path / "two.png")
    images = ["--image", tmp_path / "one.png", "--image", tmp_path / "two.png"]
    done = penstock_text(
        *["run", folder, *images, "-p", "w1 w2", "--json", "--chunk-size", 7],
        *["--max-tokens", 8, "--dtype", "float32", "--memory", "4GiB"],
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = " user <image>  <image>  w1 w2 w9"
    written, _ = plain(model, processor(text=[text], images=[one, two], return_tensors="pt"), 8)
    assert tuple(document["token_ids"]) == written
    assert document["lane"]["id"] == NATIVE_MULTIMODAL
    assert document["lane"]["applied"]
    assert [chunk["end"] - chunk["start"] for chunk in document["chunks"][:-1]] == [7] * (len(document["chunks"]) - 1)
