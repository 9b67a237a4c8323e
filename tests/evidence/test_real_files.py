"""Real files as people have them: they load, give the tokens of transformers, keep to their plans, and make sense."""

from pathlib import Path

import pytest
import torch
import transformers
from real_weights import GGUF_NAMES, penstock, real_file

from penstock.engine.engine import Engine
from penstock.errors import UnsupportedModel
from penstock.models.files import resolve

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(1800)]
MODELS = [
    "gemma3-270m",
    "qwen2.5-coder-0.5b",
    "flan-t5-small-titles",
    pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.long),
]
CHUNKS = (17, 256, 0)
NUM_TOKENS = 64
DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "chunks.md"
SOURCE = "summarize agent step: intent: {} | actions: view, edit | files: penstock/plan.py | symbols: chunk_end"
LARGEST_GAP = 0.10  # between a plan and the measured peak


def reference_tokens(name: str, ids: list[int]) -> list[int]:
    """Greedy tokens of transformers in float32, from the same file, the prompt read whole."""
    path = Path(real_file(name))
    options = {"dtype": torch.float32}
    if name in GGUF_NAMES:
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    else:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, **options)
    model.generation_config.eos_token_id = None  # it goes on, as ours does
    tokens = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_TOKENS)[0].tolist()
    return tokens[-NUM_TOKENS:]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_for_every_chunk_size(name):
    path = real_file(name)
    text = DOCUMENT.read_text()[:1500] if name in GGUF_NAMES else SOURCE.format(DOCUMENT.read_text()[:1200])
    written = {}
    for chunk_size in CHUNKS:
        settings = {"dtype": "float32", "quantize": "none", "prefix_cache": False, "chunk_size": chunk_size}
        with Engine.load(path, memory="16GiB", **settings) as engine:
            ids = engine.model.tokenizer.encode(text, add_special_tokens=True)
            output = engine.generate(ids, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert len(output.chunks) > 1 or not chunk_size
            written[chunk_size] = list(output.token_ids)
    expected = reference_tokens(name, ids)
    print(f"\n{name}: {len(ids)} tokens read in chunks of {CHUNKS}, {NUM_TOKENS} written as transformers writes them")
    assert written == dict.fromkeys(CHUNKS, expected)


@pytest.mark.parametrize("prompt_characters", [300, 8000])
@pytest.mark.parametrize("name", MODELS)
def test_plan_and_peak_agree(name, prompt_characters, tmp_path):
    path, document = real_file(name), tmp_path / "document.txt"
    document.write_text(DOCUMENT.read_text()[:prompt_characters])
    budget = ("--memory", "8GiB")
    report = penstock("run", path, "-f", document, "-p", "What is this about?", "--max-tokens", 16, *budget)
    plan = penstock("plan", path, "--prompt-tokens", report["prompt_tokens"], *budget)
    peak = report["peak_bytes"]
    print(
        f"\n{name}: {report['prompt_tokens']} tokens, peak {peak['measured'] / 1e6:.0f} MB, predicted "
        f"{peak['predicted'] / 1e6:.0f}, planned {plan['peak_bytes'] / 1e6:.0f}; read at "
        f"{report['prefill_tokens_per_s']:.0f} tok/s, written at {report['decode_tokens_per_s']:.1f}"
    )
    for said in (peak["predicted"], plan["peak_bytes"]):
        assert said == pytest.approx(peak["measured"], rel=LARGEST_GAP)


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("qwen2.5-coder-0.5b", [{"role": "user", "content": "What is the capital of France?"}], "Paris"),
        pytest.param(
            "qwen2.5-coder-1.5b",
            [{"role": "user", "content": "Write a Python function that adds two numbers a and b."}],
            "return a + b",
            marks=pytest.mark.long,
        ),
        ("gemma3-270m", "The Eiffel Tower is located in the city of", "Paris"),
        ("flan-t5-small-titles", SOURCE.format("fix the failing test of the scheduler"), "test"),
    ],
)
def test_an_answer_makes_sense(name, question, answer):
    with Engine.load(real_file(name), memory="8GiB") as engine:
        text = engine.generate(question, max_tokens=80).text
    print(f"\n{name}: {text!r}")
    assert answer in text


def test_a_model_that_writes_nothing_is_refused_with_a_reason():
    name = real_file("all-minilm-l6-v2")
    assert resolve(name).config["model_type"] == "bert"
    with pytest.raises(UnsupportedModel, match="BertModel is no causal language model"):
        Engine.load(name)
