"""Of layers that stream, few rows read the experts that they choose, and give the numbers of layers that stay."""

import os

import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_models import CASES, write_gguf
from logit_recorder import LogitRecorder
from streamed_layers import streaming
from tiny_models import prompt

from penstock.engine.engine import Engine
from penstock.errors import InvalidModelFile
from penstock.kernels import build
from penstock.plan.expert_slots import ExpertSlots

QUICK = ["qwen3-moe", "mixtral", "gpt-oss", "qwen3-next", "glm4-moe", "gemma4-moe"]
SOME = 9  # slots: of more than a layer, and of fewer than a token needs in all
PROMPT = prompt(45)
USUAL = {"memory": "4GiB", "threads": 1}


@pytest.fixture
def streamed(monkeypatch, tmp_path):
    build.kernels()  # which are kept in another cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def begin(pick=range, **others):
        streaming(monkeypatch, pick, **others)

    return begin


def stream_of(engine):
    return engine.model.lane.decoder.stream


def logits_of(engine):
    recorder = LogitRecorder(engine)
    engine.generate(PROMPT, max_tokens=6, ignore_eos=True)
    recorder.remove()
    return recorder.all


def hold(engine, num_slots):
    """Leaves so many of the slots for experts."""
    stream = stream_of(engine)
    stream._held = ExpertSlots(min(num_slots, len(stream._places)))


def num_active(engine):
    return stream_of(engine)._placement.mixture.num_active


class ReadRecorder(LogitRecorder):
    """Keeps (rows, bytes read) of each step."""

    def run(self, inputs):
        stream = self._lane.decoder.stream
        before = stream.num_read
        logits = self._lane.run(inputs)
        self.steps.append((len(inputs.ids_T), stream.num_read - before))
        return logits


def read_by_tokens(engine, num_tokens=6):
    """Bytes that each token read that was written, but for the first, which comes of the prompt."""
    recorder = ReadRecorder(engine)
    engine.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True)
    recorder.remove()
    return [num_read for num_rows, num_read in recorder.steps if num_rows == 1]


def assert_streamed_is_resident(load, streamed, *, alone, slots=(2, SOME, 10**6), **settings):
    with load(**settings) as engine:
        expected = logits_of(engine)
    streamed(experts_alone=alone, cache_bytes=4096 * 64)
    for num_slots in slots:
        with load(**settings) as engine:
            hold(engine, max(num_slots, num_active(engine)))
            assert torch.equal(logits_of(engine), expected), f"{num_slots} slots"
            assert stream_of(engine)._held._held, "experts were read alone"


@pytest.mark.parametrize("alone", [True, False], ids=["experts alone", "layers"])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize("name", QUICK)
def test_chosen_experts_give_the_numbers_of_all_that_stay(name, chunk_size, alone, streamed, tiny):
    folder = str(tiny(name)[0])

    def load(**settings):
        return Engine.load(folder, **USUAL, dtype="float32", **settings)

    assert_streamed_is_resident(load, streamed, alone=alone, chunk_size=chunk_size)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("settings", [{}, {"quantize": "int4"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe-normalized", "gpt-oss"])
def test_so_they_do_in_c(name, settings, streamed, tiny):
    folder = str(tiny(name)[0])

    def load(**others):
        return Engine.load(folder, **USUAL, dtype="bfloat16", **settings, **others)

    assert_streamed_is_resident(load, streamed, alone=False, slots=(SOME,), chunk_size=7)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
KINDS = {"blk.0": Type.Q4_K, "blk.1": Type.Q6_K, "blk.2": Type.Q8_0}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a tiny mixture whose layers are in types of their own."""

    def made(case, **values):
        architecture, plain = CASES[case]

        def config():
            real = tiny_models._config
            with monkeypatch.context() as patch:
                patch.setattr("gguf_models._config", lambda name, **given: real(name, **given | WIDE | values))
                return plain()

        monkeypatch.setitem(tiny_models.CONFIGS, case, config)
        tiny_models.save_tiny_model(case, tmp_path)
        kinds = lambda name: Type.Q5_K if "up_exps" in name else KINDS.get(name[:5], Type.Q4_K)  # noqa: E731
        return write_gguf(tmp_path, architecture, tmp_path / "model.gguf", kinds)

    return made


CODED = {"qwen2moe": {"shared_expert_intermediate_size": 256}, "qwen3moe": {}}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("alone", [True, False], ids=["experts alone", "layers"])
@pytest.mark.parametrize("case", CODED)
def test_codes_of_chosen_experts_give_the_numbers_of_all_that_stay(case, alone, streamed, write):
    path = str(write(case, **CODED[case]))

    def load(**settings):
        return Engine.load(path, **USUAL, dtype="bfloat16", **settings)

    assert_streamed_is_resident(load, streamed, alone=alone, chunk_size=7)


def test_so_they_do_where_nothing_multiplies_them(streamed, write):
    path = str(write("qwen2moe", **CODED["qwen2moe"]))

    def load(**settings):
        return Engine.load(path, **USUAL, dtype="float32", quantize="keep", **settings)

    assert_streamed_is_resident(load, streamed, alone=True, slots=(SOME,), chunk_size=1)


@pytest.mark.parametrize("alone", [True, False], ids=["experts alone", "layers"])
@pytest.mark.parametrize("num_slots", [2, SOME])
def test_a_token_reads_at_most_its_experts_and_the_rest_of_each_layer(num_slots, alone, streamed, load):
    streamed(experts_alone=alone)
    engine = load("mixtral", chunk_size=64)
    hold(engine, num_slots)
    placement = engine.model.memory.placement
    written = read_by_tokens(engine)
    assert len(written) == 5
    assert max(written) <= placement.token_bytes
    assert placement.token_bytes <= placement.pass_bytes * (0.5 if alone else 0.75)
    if num_slots == 2:  # which the next layer takes
        assert set(written) == {placement.token_bytes}


def test_experts_that_are_held_are_not_read_again(streamed, load):
    streamed(experts_alone=True, cache_bytes=10**7)
    engine = load("mixtral", chunk_size=1, prefix_cache=False)
    logits_of(engine)
    before = stream_of(engine).num_read
    logits_of(engine)
    assert before > 0
    assert stream_of(engine).num_read == before


def test_wide_steps_read_whole_layers_and_leave_what_is_held_beside_the_ring(streamed, load):
    streamed(experts_alone=True, cache_bytes=10**7)
    engine = load("mixtral", chunk_size=64, prefix_cache=False)
    stream, placement = stream_of(engine), engine.model.memory.placement
    for expected in (placement.pass_bytes, placement.pass_bytes):
        before = stream.num_read
        engine.generate(PROMPT, max_tokens=1)
        assert stream.num_read - before == expected
    logits = logits_of(engine)
    in_ring = sum(place < len(stream._slots) * stream._slot_bytes for place in stream._places)
    beside = {key for key, slot in stream._held._held.items() if slot >= in_ring}
    for _ in range(2):  # slots beside the ring are used when those within it are
        assert torch.equal(logits_of(engine), logits)
        assert beside <= set(stream._held._held)


def test_several_answers_at_once_are_those_of_layers_that_stay(streamed, load):
    prompts = [PROMPT, prompt(20, seed=3), prompt(9, seed=5)]
    answers = [one.token_ids for one in load("mixtral", chunk_size=16).generate_batch(prompts, max_tokens=12)]
    streamed(cache_bytes=4096 * 20)
    engine = load("mixtral", chunk_size=16)
    for _ in range(2):
        assert [one.token_ids for one in engine.generate_batch(prompts, max_tokens=12)] == answers


@pytest.fixture
def own_copy(tmp_path):
    tiny_models.save_tiny_model("mixtral", tmp_path / "model")
    return tmp_path / "model"


SETTINGS = {"chunk_size": 1, "prefix_cache": False, **USUAL}


def test_an_expert_that_cannot_be_read_ends_the_request_and_the_next_one_has_it(streamed, own_copy):
    streamed(experts_alone=True)
    with Engine.load(str(own_copy), **SETTINGS) as engine:
        expected = logits_of(engine)
        hold(engine, SOME)
        files = {run.file for runs in stream_of(engine)._runs.values() for run in runs}
        kept = {file: os.dup(file._file.fileno()) for file in files}
        broken = os.open(os.devnull, os.O_WRONLY)  # which cannot be read from
        for file in files:
            os.dup2(broken, file._file.fileno())
            file._facts = file._stat()
        with pytest.raises(InvalidModelFile, match="cannot be read: Bad file descriptor"):
            engine.generate(PROMPT, max_tokens=3)
        assert not stream_of(engine)._held._held
        for file, handle in kept.items():
            os.dup2(handle, file._file.fileno())
            file._facts = file._stat()
            os.close(handle)
        os.close(broken)
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut short", "written over"])
def test_a_file_that_changes_gives_no_token_even_of_experts_that_are_held(is_cut, streamed, own_copy):
    streamed(experts_alone=True, cache_bytes=10**7)
    with Engine.load(str(own_copy), **SETTINGS) as engine:
        logits_of(engine)
        (path,) = {run.file.path for runs in stream_of(engine)._runs.values() for run in runs}
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(len(content) // 2) if is_cut else file.write(content[: len(content) // 2])
        with pytest.raises(InvalidModelFile, match="has changed since it was loaded"):
            engine.generate(PROMPT, max_tokens=3)
        assert not engine.has_work


def test_a_step_that_breaks_off_between_layers_leaves_experts_that_are_right(streamed, own_copy):
    streamed(cache_bytes=4096 * 20)
    with Engine.load(str(own_copy), **SETTINGS) as engine:
        expected = logits_of(engine)

        def break_off(event):
            raise OSError("broken")

        engine.on_layer = break_off
        with pytest.raises(OSError, match="broken"):
            engine.generate(prompt(5, seed=8), max_tokens=3)
        engine.on_layer = None
        assert torch.equal(logits_of(engine), expected)
