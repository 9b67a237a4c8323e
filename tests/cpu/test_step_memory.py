"""What the memory model says of a step on a card, where all pages are taken at load: it needs no card to say it."""

import dataclasses

import pytest
import torch

from penstock.config import load_config
from penstock.engine.loading import load_model
from penstock.engine.planning import require_room
from penstock.engine.step_memory import StepMemory

MIB = 2**20


@pytest.fixture
def step_memory(tiny):
    def make(budget_bytes, **settings):
        config = load_config({"dtype": "float32", "memory": "4GiB", "threads": 1} | settings).on_device("cuda")
        model = load_model(str(tiny("qwen3")[0]), config)
        memory = dataclasses.replace(model.memory, runtime_bytes=0)
        num_tokens = require_room(memory, config, budget_bytes, "cuda")
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
    assert load_config({}).on_device("cpu").most_prompt_tokens == 1024
    assert load_config({}).on_device("cuda").most_prompt_tokens == 2048
    assert load_config({"latency_target_ms": 50}).on_device("cuda").most_prompt_tokens == 8192
    assert load_config({"latency_target_ms": 50, "max_chunk_size": 300}).on_device("cuda").most_prompt_tokens == 300
    assert load_config({"chunk_size": 0}).on_device("cuda").most_prompt_tokens == 0
