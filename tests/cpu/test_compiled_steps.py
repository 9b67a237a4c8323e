"""Steps in one call of C give the very numbers that the same layers give one by one."""

import pytest
import torch
from logit_recorder import LogitRecorder
from tiny_models import prompt

pytestmark = pytest.mark.usefixtures("compiled")

PROMPTS = [prompt(130), prompt(45)[7:20], prompt(45)[:3]]


def logits_of(engine):
    recorder = LogitRecorder(engine)
    engine.generate_batch(PROMPTS, max_tokens=12, ignore_eos=True)
    return recorder.all


@pytest.mark.parametrize(
    "settings", [{"chunk_size": 100}, {"chunk_size": 29, "threads": 3}, {"chunk_size": 8, "quantize": "int4"}], ids=str
)
@pytest.mark.parametrize(
    "name", ["llama-mha-tied-bias", "qwen3-yarn-mixed-windows", "smollm3", "phi3-partial-rotary", "gemma2", "gemma3"]
)
def test_a_step_in_one_call_is_the_step_layer_by_layer(name, settings, load):
    in_one, by_layers = (load(name, dtype="bfloat16", **settings) for _ in range(2))
    assert in_one.model.lane.steps is not None
    by_layers.model.lane.steps = None
    assert torch.equal(logits_of(in_one), logits_of(by_layers))


@pytest.mark.parametrize("name", ["olmo2", "qwen3-moe", "qwen3-5"])
def test_other_layers_run_one_by_one(name, load):
    assert load(name, dtype="bfloat16").model.lane.steps is None


def test_without_the_c_kernels_there_are_no_such_steps(load):
    assert load("llama").model.lane.steps is None, "float32"
    assert load("llama", dtype="bfloat16", cpu_kernels="torch").model.lane.steps is None
