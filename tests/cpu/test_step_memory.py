"""What the memory model says of a step on a card, where all pages are taken at load: it needs no card to say it."""

import dataclasses

import pytest
import torch
from tiny_models import CONFIGS, prompt

from penstock.config import load_config
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.engine.step_memory import StepMemory
from penstock.lanes.table import settle
from penstock.models.files import resolve
from penstock.models.shapes import native_shape
from penstock.request import PrefillProgress

MIB = 2**20


@pytest.fixture
def step_memory(tiny):
    def make(budget_bytes, **settings):
        config = load_config({"dtype": "float32", "memory": "4GiB", "threads": 1} | settings).on_device("cuda")
        model = load_model(str(tiny("qwen3")[0]), config)
        memory = dataclasses.replace(model.memory, runtime_bytes=0)
        place = settle(resolve(str(tiny("qwen3")[0])), config, has_cuda=False)
        num_tokens = dataclasses.replace(place, device="cuda", budget_bytes=budget_bytes).room(memory)
        model = dataclasses.replace(
            model,
            memory=memory,
            budget_bytes=budget_bytes,
            num_blocks=num_tokens // config.block_size,
            device=torch.device("cuda"),
        )
        return StepMemory(model, config, None), memory, num_tokens

    return make


@pytest.mark.parametrize("budget_mib", [4, 8, 40])
def test_the_chunk_that_room_was_kept_for_fits_at_any_time_and_no_larger_one(step_memory, budget_mib):
    steps, memory, capacity = step_memory(budget_mib * MIB)
    kept = steps.chunk_limit(0, 0, 100_000)
    assert 16 <= kept < capacity
    assert kept >= min(2048, capacity // 4)  # halved only as often as it had to be
    for start, resident in ((0, 0), (0, capacity), (capacity - kept, capacity)):
        assert steps.chunk_limit(start, resident, 100_000) == kept
        assert steps.peak_estimate(kept, start + kept, resident) <= budget_mib * MIB
    assert steps.peak_estimate(1, 1, 16) >= memory.fixed_bytes(capacity)


def test_room_is_kept_for_whole_prompts_where_they_are_asked_for(step_memory):
    steps, memory, capacity = step_memory(400 * MIB, chunk_size=0)
    longest = memory.shape.max_context
    assert capacity >= longest
    assert steps.chunk_limit(0, capacity, longest) == longest


def test_a_latency_target_alone_limits_chunks_on_a_card():
    """But those of experts, whose weights a step of few tokens reads as well."""
    assert load_config({}).on_device("cpu").most_prompt_tokens == 1024
    assert load_config({}).on_device("cuda").most_prompt_tokens == 2048
    assert load_config({"latency_target_ms": 50}).on_device("cuda").most_prompt_tokens == 8192
    assert load_config({"latency_target_ms": 50, "max_chunk_size": 300}).on_device("cuda").most_prompt_tokens == 300
    assert load_config({"chunk_size": 0}).on_device("cuda").most_prompt_tokens == 0
    assert load_config({}).on_device("cuda", gains_from_width=True).most_prompt_tokens == 8192
    assert load_config({}).on_device("cpu", gains_from_width=True).most_prompt_tokens == 1024


def test_a_card_keeps_what_each_expert_of_a_token_gives():
    config = CONFIGS["qwen3-moe"]().to_dict()  # two experts of 40, hidden size 64
    shapes = {device: native_shape(config, "bfloat16", device=device) for device in ("cpu", "cuda")}
    assert shapes["cpu"].expert_bytes_per_token == 0
    assert shapes["cuda"].expert_bytes_per_token >= 2 * (2 * 40 + 2 * 64)
    assert native_shape(CONFIGS["qwen3"]().to_dict(), "bfloat16", device="cuda").expert_bytes_per_token == 0


def test_progress_names_the_peak_of_the_whole_prompt_from_the_first_chunk_on(tiny):
    with Engine.load(str(tiny("llama")[0]), chunk_size=64, threads=1) as engine:
        events = list(engine.stream(prompt(900), max_tokens=1))
    told = [event.predicted_peak_bytes for event in events if isinstance(event, PrefillProgress)]
    assert len(told) == 15
    assert set(told) == {events[-1].output.predicted_peak_bytes}
