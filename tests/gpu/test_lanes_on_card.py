"""The lanes around models of transformers, and images before our decoder: on the card what the CPU gives in float32."""

from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytest.importorskip("PIL")

from logit_recorder import LogitRecorder
from tiny_generic import MUST_SHOW, save_causal_model
from tiny_models import prompt, save_tokenizer
from tiny_seq2seq import save_tiny_seq2seq
from tiny_vision_models import gemma3_processor, idefics3_processor, llava_processor, pictures, tiny_vision_model

from penstock.engine.engine import Engine
from penstock.lanes.lane import GENERIC_MULTIMODAL, GENERIC_TEXT, NATIVE_MULTIMODAL

TOLERANCE = 1e-4
NUM_GENERATED = 16
PROMPT = prompt(150)
TEXT = "w1 w2 <image> w3 w4 w5 <image> w6 w7 w8 w9"
PROCESSORS = {"llava": llava_processor, "gemma3": gemma3_processor, "idefics3": idefics3_processor}


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(folder, asked, **settings):
    """(logits of each generated token, output) of a greedy run that ignores the end token."""
    with Engine.load(str(folder), **({"dtype": "float32", "memory": "4GiB", "threads": 4} | settings)) as engine:
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


@pytest.mark.parametrize("lane", [NATIVE_MULTIMODAL, GENERIC_MULTIMODAL])
@pytest.mark.parametrize("name", PROCESSORS)
def test_images(name, lane, tmp_path):
    tiny_vision_model(name).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    PROCESSORS[name]().save_pretrained(tmp_path)
    assert_equal_on_card(tmp_path, {"prompt": TEXT, "images": pictures(2)}, (0, 7), lane=lane)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_sources(name, tmp_path):
    save_tiny_seq2seq(name, tmp_path)
    assert_equal_on_card(tmp_path, {"prompt": PROMPT}, (0, 16))
