"""Any causal transformers model gives in chunks, in batches and after a prefix hit what it gives read whole."""

from pathlib import Path

import pytest
import torch
from float64_reference import float64_logits
from lane_ids import GENERIC_TEXT
from logit_recorder import LogitRecorder
from tiny_causal import tiny_causal_model
from tiny_generic import MUST_SHOW, TROUBLE, save_causal_model
from tiny_models import prompt, save_tokenizer

from penstock.engine.engine import Engine
from penstock.errors import InvalidModelFile, PromptTooLong, UnknownLane, UnsupportedModel

TOLERANCE = 1e-4
NUM_GENERATED = 32
PROMPT = prompt(150)
CONFIGS = MUST_SHOW | TROUBLE
PAGED = ("llama", "qwen3", "gemma3", "gpt-oss")
OWN_CACHE = ("mamba2", "bamba", "qwen3-next", "bloom")
READ_WHOLE = ("mamba", "jamba", "falcon-mamba", "minimax", "recurrent-gemma", "llama-dynamic")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> (folder, transformers model), made once; verdicts are kept in a folder of the test's own."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, save_causal_model(CONFIGS[name](), folder))
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield make


@pytest.fixture
def load(saved):
    engines = []

    def make(name, **settings):
        defaults = {"dtype": "float32", "memory": "4GiB", "threads": 1, "lane": GENERIC_TEXT}
        engines.append(Engine.load(str(saved(name)[0]), **defaults | settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@torch.no_grad()
def whole_logits(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def read(engine, tokens=PROMPT):
    recorder = LogitRecorder(engine)
    output = engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True)
    return recorder.all, output


@pytest.mark.parametrize("chunk_sizes", [(0, 7), pytest.param((1, 64), marks=pytest.mark.evidence)], ids=str)
@pytest.mark.parametrize("name", [*PAGED, *OWN_CACHE])
def test_every_chunk_size_equals_transformers_on_the_whole_prompt(name, chunk_sizes, saved, load):
    for chunk_size in chunk_sizes:
        logits, output = read(load(name, chunk_size=chunk_size))
        every = torch.tensor([[*PROMPT, *output.token_ids][:-1]])
        # In float64, because transformers' whole prompt in float32 may be as far from it on the other side.
        reference = float64_logits(saved(name)[1], {"input_ids": every})[len(PROMPT) - 1 :]
        assert (logits - reference).abs().max() <= TOLERANCE, f"chunk size {chunk_size}"
        assert output.token_ids == tuple(reference.argmax(-1).tolist())
        assert len(output.chunks) == (-(-len(PROMPT) // chunk_size) if chunk_size else 1)


@pytest.mark.parametrize("name", READ_WHOLE)
def test_a_model_that_chunks_would_change_is_read_whole_and_says_so(name, saved, load):
    engine = load(name, chunk_size=7)
    logits, output = read(engine)
    assert len(output.chunks) == 1
    facts = engine.lane.after_reading(len(output.chunks))
    assert not facts.applied
    assert "read whole" in facts.reason
    assert facts.boundary == facts.mask_mode == ""
    assert any("read whole" in adjustment for adjustment in engine.plan(150).adjustments)
    reference = whole_logits(saved(name)[1], PROMPT)[-1]
    assert (logits[0] - reference).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", READ_WHOLE[:2])
def test_strict_refuses_a_model_that_chunks_would_change(name, load):
    with pytest.raises(UnsupportedModel, match=r"--strict: .* differ"):
        load(name, strict=True)


@pytest.mark.parametrize("name", ["gpt-oss", "bamba", "mamba", "jamba"])
def test_many_requests_at_once_equal_each_alone(name, load):
    prompts = [prompt(length, seed=length) for length in (1, 5, 40, 97, 150)]
    alone = [read(load(name, chunk_size=0), tokens)[1].token_ids for tokens in prompts]
    together = load(name, chunk_size=24).generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
    assert [output.token_ids for output in together] == alone


def test_packed_models_share_prefixes_and_others_say_that_they_do_not(load):
    engine = load("gpt-oss", chunk_size=16)
    whole = read(load("gpt-oss", chunk_size=0))[0]
    read(engine, PROMPT[:120])
    logits, output = read(engine)
    assert output.num_cached_tokens == 112
    assert (logits - whole).abs().max() <= TOLERANCE
    engine = load("bamba", chunk_size=16)
    read(engine, PROMPT[:120])
    assert read(engine)[1].num_cached_tokens == 0
    assert any("prefix cache is off" in adjustment for adjustment in engine.plan(150).adjustments)


@pytest.mark.parametrize("name", ["bamba", "mamba"])
def test_a_sequence_that_lost_its_blocks_is_read_again(name, load):
    """With fourteen blocks for three requests of five each, they push each other out."""
    prompts = [prompt(length, seed=length) for length in (38, 39, 40)]
    alone = [read(load(name, chunk_size=0), tokens)[1].token_ids for tokens in prompts]
    engine = load(name, chunk_size=16, context=74, max_running=3)
    assert engine.model.num_blocks == 14
    together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
    assert engine.scheduler.num_preemptions > 0
    assert [output.token_ids for output in together] == alone


def test_a_step_that_fails_midway_is_made_good(load, monkeypatch):
    engine = load("bamba", chunk_size=16)
    expected = read(load("bamba", chunk_size=0))[1].token_ids
    caches = engine.model.lane.ways
    run, num_calls = caches.run, 0

    def failing(inputs):
        nonlocal num_calls
        num_calls += 1
        logits = run(inputs)
        if num_calls in (3, 15):
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(caches, "run", failing)
    request = engine.submit(PROMPT, max_tokens=NUM_GENERATED, ignore_eos=True)
    outputs = []
    while not outputs:
        try:
            outputs = [event.output for event in engine.step() if hasattr(event, "output")]
        except KeyboardInterrupt:
            continue
    assert outputs[0].request_id == request
    assert outputs[0].token_ids == expected


def test_what_a_sequence_kept_is_freed_when_it_ends_or_is_cancelled(load):
    engine = load("bamba", chunk_size=16)
    caches = engine.model.lane.ways
    for request in [engine.submit(PROMPT, max_tokens=4) for _ in range(2)]:
        engine.step()
        assert caches.num_bytes(request) > 0
        engine.abort(request)
        assert caches.num_bytes(request) == 0
    read(engine)
    assert not caches._kept


def test_a_whole_prompt_that_does_not_fit_is_refused_with_the_numbers(load):
    engine = load("jamba")
    engine.memory.budget_bytes = engine.model.memory.fixed_bytes(150) + 60_000
    with pytest.raises(PromptTooLong, match=r"150 tokens .* must read it whole .* allows \d+\. .* to [\d.]+[MG]B\."):
        engine.submit(PROMPT)


def test_code_that_comes_with_a_model_is_refused(tmp_path):
    save_causal_model(MUST_SHOW["mamba2"](), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoModelForCausalLM": "evil.Model"},', 1))
    with pytest.raises(UnsupportedModel, match=r"code of its own \(auto_map\)"):
        Engine.load(str(tmp_path))


def test_a_lane_that_cannot_run_the_model_is_refused(saved):
    with pytest.raises(UnknownLane, match="jamba has no native decoder"):
        Engine.load(str(saved("jamba")[0]), lane="optimized-native-text")


def test_missing_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_causal_model(MUST_SHOW["mamba2"](), tmp_path)
    path = Path(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["backbone.norm_f.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidModelFile, match=r"norm_f\.weight"):
        Engine.load(str(tmp_path), memory="4GiB")


@pytest.mark.evidence
def test_heads_that_the_config_tells_elsewhere_are_counted_once_the_model_is_loaded(tmp_path):
    """Layers with windows have more key-value heads, and values are wider than keys: the plan cannot know."""
    model = tiny_causal_model("mimo_v2_flash")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    cache = model(input_ids=torch.arange(3, 9)[None], use_cache=True).past_key_values
    kept = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    per_token = sum(part.shape[1] * part.shape[3] * part.element_size() for part in kept)
    with Engine.load(str(tmp_path), dtype="float32", memory="4GiB", threads=1) as engine:
        assert engine.model.memory.shape.kv_bytes_per_token == per_token
