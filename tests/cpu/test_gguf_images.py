"""Image models as two GGUF files: answers of the same model in safetensors, and what is said where files do not fit."""

import shutil

import pytest
from gguf import GGMLQuantizationType as Quant
from gguf_image_models import END, IMAGE, PAD, PROJECTORS, START, write_image_model, write_tower
from image_answers import EXACT, SETTINGS, plain
from lane_ids import NATIVE_MULTIMODAL, NATIVE_TEXT
from logit_recorder import LogitRecorder
from tiny_models import prompt
from tiny_vision_models import TEXT, pictures, save_tiny_vision_model

import penstock
from penstock.engine.engine import Engine
from penstock.errors import InvalidMedia, InvalidModelFile, InvalidSetting, ModelNotFound, UnsupportedModel

LATER = {"qwen3-vl-moe"}
NAMES = [pytest.param(name, marks=pytest.mark.evidence if name in LATER else ()) for name in PROJECTORS]


def text(name):
    image = IMAGE.get(name, START + PAD + END)
    return f"ab {image} cd ef {image} gh"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def found(name):
        if name not in made:
            made[name] = write_image_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return found


@pytest.fixture
def copied(written, tmp_path):
    """A folder of its own, for files that are damaged."""
    return shutil.copytree(written("gemma3")[1].parent, tmp_path / "copy")


def adjustments(path, **settings):
    return penstock.plan(str(path), prompt_tokens=100, memory="4GiB", **settings).prompt.adjustments


@pytest.mark.parametrize("name", NAMES)
def test_pictures_in_any_chunks_give_the_logits_of_the_model_in_safetensors(name, written):
    model, path = written(name)
    for chunk_size in (7, 0):
        with Engine.load(str(path), chunk_size=chunk_size, **SETTINGS) as engine:
            assert engine.lane.id == NATIVE_MULTIMODAL
            recorder = LogitRecorder(engine)
            output = engine.generate(text(name), images=pictures(2), max_tokens=8, ignore_eos=True)
            tokens, reference = plain(model, engine.model.lane.processor.inputs(text(name), pictures(2)), 8)
        assert output.token_ids == tokens
        assert float((recorder.all - reference).abs().max()) <= EXACT


def test_a_decoder_in_few_bits_keeps_them_beside_its_tower(tmp_path):
    path = write_image_model("qwen2.5-vl", tmp_path, Quant.Q8_0)[1]
    with Engine.load(str(path), memory="4GiB", threads=1, dtype="bfloat16") as engine:
        assert engine.model.quantize in ("keep", "none")
        whole = engine.generate(text("qwen2.5-vl"), images=pictures(2), max_tokens=4, ignore_eos=True).token_ids
    with Engine.load(str(path), memory="4GiB", threads=1, dtype="bfloat16", chunk_size=5) as engine:
        assert engine.generate(text("qwen2.5-vl"), images=pictures(2), max_tokens=4, ignore_eos=True).token_ids == whole


def test_files_of_older_converters_have_the_two_matrices_of_an_mlp_the_other_way_round(copied, written):
    write_tower("gemma3", written("gemma3")[0], copied / "mmproj-model.gguf", swaps=True)
    with Engine.load(str(copied / "model.gguf"), **SETTINGS) as engine:
        output = engine.generate(text("gemma3"), images=pictures(2), max_tokens=8, ignore_eos=True)
        tokens = plain(written("gemma3")[0], engine.model.lane.processor.inputs(text("gemma3"), pictures(2)), 8)[0]
    assert output.token_ids == tokens


def test_a_text_alone_reads_as_on_the_text_lane(written):
    path = str(written("qwen3-vl")[1])
    with Engine.load(path, **SETTINGS) as one, Engine.load(path, text_only=True, **SETTINGS) as other:
        assert (one.lane.id, other.lane.id) == (NATIVE_MULTIMODAL, NATIVE_TEXT)
        tokens = prompt(30)
        assert one.generate(tokens, max_tokens=8).token_ids == other.generate(tokens, max_tokens=8).token_ids


def test_a_plan_knows_the_tower_and_says_where_there_is_none(written, tmp_path):
    path = written("qwen3-vl")[1]
    with_tower = penstock.plan(str(path), prompt_tokens=100, memory="4GiB")
    assert with_tower.lane.id == NATIVE_MULTIMODAL
    alone = shutil.copy(path, tmp_path / "model.gguf")
    assert any("no mmproj file lies beside" in one for one in adjustments(alone))
    assert penstock.plan(str(alone), prompt_tokens=100, memory="4GiB").lane.id == NATIVE_TEXT
    named = penstock.plan(str(alone), prompt_tokens=100, memory="4GiB", mmproj=str(path.parent / "mmproj-model.gguf"))
    assert (named.lane.id, named.prompt.peak_bytes) == (NATIVE_MULTIMODAL, with_tower.prompt.peak_bytes)
    with Engine.load(str(alone), **SETTINGS) as engine, pytest.raises((InvalidMedia, InvalidSetting)):
        engine.generate(text("qwen3-vl"), images=pictures(2), max_tokens=1)


def test_a_tower_of_another_model_is_left_aside_and_refused_where_it_is_asked_for(written, tmp_path):
    path = shutil.copy(written("qwen3-vl")[1], tmp_path / "model.gguf")
    other = shutil.copy(written("gemma3")[1].parent / "mmproj-model.gguf", tmp_path / "mmproj-other.gguf")
    assert any("belongs to another model" in one for one in adjustments(path))
    with pytest.raises(InvalidModelFile, match="take both files of one model"):
        adjustments(path, mmproj=str(other))
    shutil.copy(written("qwen3-vl")[1].parent / "mmproj-model.gguf", tmp_path / "mmproj-third.gguf")
    assert penstock.plan(str(path), prompt_tokens=9, memory="4GiB").lane.id == NATIVE_MULTIMODAL


def test_a_file_that_is_missing_damaged_or_unknown_is_refused_by_its_name(copied, written):
    path, tower = copied / "model.gguf", copied / "mmproj-model.gguf"
    with pytest.raises(ModelNotFound, match="there is no such file"):
        adjustments(path, mmproj=str(copied / "nowhere.gguf"))
    with pytest.raises(InvalidModelFile, match="holds no vision tower"):
        adjustments(path, mmproj=str(path))
    with pytest.raises(InvalidSetting, match="for a model in a GGUF file"):
        penstock.plan(str(copied / "text"), prompt_tokens=9, memory="4GiB", mmproj=str(tower))
    whole = tower.read_bytes()
    tower.write_bytes(whole[: len(whole) // 2])
    assert any("truncated" in one for one in adjustments(path))
    write_tower("gemma3", written("gemma3")[0], tower, projector_type="resampler")
    with pytest.raises(UnsupportedModel, match="projector of type 'resampler'"):
        adjustments(path, mmproj=str(tower))
    write_tower("gemma3", written("gemma3")[0], tower, **{"vision.block_count": 1 << 30})
    with pytest.raises(InvalidModelFile, match="has no tensor"):
        adjustments(path, mmproj=str(tower))
    write_tower("gemma3", written("gemma3")[0], tower, **{"vision.attention.head_count": None})
    with pytest.raises(InvalidModelFile, match="head_count is missing"):
        adjustments(path, mmproj=str(tower))


@pytest.mark.parametrize(("left_out", "added"), [("v.blk.1.ln2.bias", None), (None, "v.blk.1.extra.weight")])
def test_a_tower_with_a_tensor_too_few_or_too_many_is_refused(left_out, added, copied, written):
    tower = copied / "mmproj-model.gguf"
    write_tower("gemma3", written("gemma3")[0], tower, left_out=left_out, added=added)
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=r"no tensor for|holds tensor"):
        Engine.load(str(copied / "model.gguf"), **SETTINGS)


def test_the_decoder_of_a_folder_is_made_few_bits_on_request(tmp_path):
    save_tiny_vision_model("llava", tmp_path)
    settings = {"memory": "4GiB", "threads": 1, "dtype": "bfloat16", "quantize": "int8"}
    written = []
    for chunk_size in (0, 7):
        with Engine.load(str(tmp_path), chunk_size=chunk_size, **settings) as engine:
            assert engine.model.quantize == "int8"
            answer = engine.generate(TEXT, images=pictures(2), max_tokens=6, ignore_eos=True)
            written.append(answer.token_ids)
    assert written[0] == written[1]
