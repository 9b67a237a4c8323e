"""The lanes around models of transformers, and images before our decoder: on the card what the CPU gives in float32."""

from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytest.importorskip("PIL")

from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT, NATIVE_MULTIMODAL
from logit_recorder import LogitRecorder
from tiny_generic import MUST_SHOW, save_causal_model
from tiny_models import prompt, save_tokenizer
from tiny_seq2seq import save_tiny_seq2seq
from tiny_vision_models import (
    KINDS,
    PROCESSORS,
    TEXT,
    TensorProcessor,
    pictures,
    plain_inputs,
    save_tiny_vision_model,
    tiny_vision_model,
)

from penstock.attention.cuda import CudaAttention
from penstock.cache.storage import KvStorage
from penstock.engine.engine import Engine
from penstock.foreign.processor import MediaProcessor
from penstock.lanes.graphs import DecodeGraphs

TOLERANCE = 1e-4
NUM_GENERATED = 16
PROMPT = prompt(150)


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(folder, asked, processor=None, **settings):
    """(logits of each generated token, output) of a greedy run that ignores the end token."""
    with Engine.load(str(folder), **({"dtype": "float32", "memory": "4GiB", "threads": 4} | settings)) as engine:
        if processor is not None:
            engine.model.lane.processor = processor
        recorder = LogitRecorder(engine)
        output = engine.generate(**asked, max_tokens=NUM_GENERATED, ignore_eos=True)
        return recorder.all.cpu(), output


def assert_equal_on_card(folder, asked, chunk_sizes, reference="cpu", **settings):
    expected, expected_output = read(folder, asked, device=reference, chunk_size=chunk_sizes[0], **settings)
    for chunk_size in chunk_sizes:
        logits, output = read(folder, asked, device="cuda", chunk_size=chunk_size, **settings)
        assert (logits - expected).abs().max() <= TOLERANCE, f"chunk size {chunk_size}"
        assert output.token_ids == expected_output.token_ids, f"chunk size {chunk_size}"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "bamba", "qwen3-next", "mamba2"])
def test_models_of_transformers(name, tmp_path):
    save_causal_model(MUST_SHOW[name](), tmp_path)
    # Where flash-linear-attention is installed, transformers gives its kernels to a CPU too, which has none.
    reference = "cuda" if name in ("qwen3-next", "mamba2") and find_spec("fla") else "cpu"
    assert_equal_on_card(tmp_path, {"prompt": PROMPT}, (0, 7, 64), reference, lane=GENERIC_TEXT)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_several_prompts_packed_into_one_step(name, tmp_path):
    save_causal_model(MUST_SHOW[name](), tmp_path)
    prompts = [prompt(length, seed=length) for length in (1, 5, 40, 97)]
    settings = {"dtype": "float32", "memory": "4GiB", "device": "cuda", "lane": GENERIC_TEXT}
    with Engine.load(str(tmp_path), **settings, chunk_size=0) as engine:
        alone = [engine.generate(tokens, max_tokens=8, ignore_eos=True).token_ids for tokens in prompts]
    with Engine.load(str(tmp_path), **settings, chunk_size=24) as engine:
        together = engine.generate_batch(prompts, max_tokens=8, ignore_eos=True)
    assert [output.token_ids for output in together] == alone


def decodes(folder, *, is_replaying):
    """Logits of every step of several requests that come one after the other."""
    found = []
    settings = {"dtype": "bfloat16", "memory": "4GiB", "device": "cuda", "lane": GENERIC_TEXT, "chunk_size": 64}
    with Engine.load(str(folder), **settings, prefix_cache=False) as engine:
        engine.warm_up()
        lane = engine.model.lane
        assert lane.ways.graphs is not None, "its decodes are not captured"
        lane.ways.graphs.is_replaying = is_replaying
        run = lane.run

        def record(inputs):
            logits = run(inputs)
            found.append(logits.cpu())
            return logits

        lane.run = record
        for length in (1, 70, 5, 40, 97):
            engine.submit(prompt(length, seed=length), max_tokens=12, ignore_eos=True)
            for _ in range(3):
                engine.step()
        while engine.scheduler.has_work:
            engine.step()
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_decodes_are_bitwise_equal_with_recordings_and_without(name, tmp_path):
    save_causal_model(MUST_SHOW[name](), tmp_path)
    replayed, launched = (decodes(tmp_path, is_replaying=is_replaying) for is_replaying in (True, False))
    assert max(len(logits) for logits in replayed) >= 4
    assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))


class AsksTheDevice:
    """Takes another way where a token is large, as a model does whose rotary table depends on the length."""

    device = torch.device("cuda")

    def forward(self, inputs, attention):
        return inputs.ids_T[:, None] * (2 if inputs.ids_T.max() > 7 else 1)


def test_a_model_that_asks_the_device_is_not_recorded():
    storage = KvStorage(
        num_layers=1, num_slots=64, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, device=AsksTheDevice.device
    )
    attention = CudaAttention(storage, 16, num_heads=4).for_decodes(max_rows=4, max_context=64)
    assert not DecodeGraphs(AsksTheDevice(), attention).can_capture()
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("lane", [NATIVE_MULTIMODAL, GENERIC_MULTIMODAL])
@pytest.mark.parametrize("name", PROCESSORS)
def test_images(name, lane, tmp_path):
    tiny_vision_model(name).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    PROCESSORS[name]().save_pretrained(tmp_path)
    assert_equal_on_card(tmp_path, {"prompt": TEXT, "images": pictures(2)}, (0, 7), lane=lane)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in PROCESSORS])
def test_images_of_models_whose_processors_need_more_libraries(name, tmp_path):
    """Among them those whose tokens have positions on several axes."""
    model = save_tiny_vision_model(name, tmp_path)
    processor = MediaProcessor(TensorProcessor(plain_inputs(name, model)))
    asked = {"prompt": TEXT, "images": pictures(2)}
    assert_equal_on_card(tmp_path, asked, (0, 7), lane=NATIVE_MULTIMODAL, processor=processor)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_sources(name, tmp_path):
    save_tiny_seq2seq(name, tmp_path)
    assert_equal_on_card(tmp_path, {"prompt": PROMPT}, (0, 16))
