"""Hybrids, mixtures and image models of a small but realistic shape: both lanes, and a document that is asked twice."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, PictureProcessor, pictures, save_family, text_tokens
from field_families import FIELD, MADE_BY_TYPE, field_model
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT
from logit_recorder import LogitRecorder
from tiny_causal import CannotBuild
from tiny_models import prompt, reference_logits, save_tokenizer

from penstock.engine.engine import Engine
from penstock.errors import UnsupportedModel
from penstock.foreign.processor import MediaProcessor
from penstock.request import Output

SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 2, "memory": "12GiB", "context": 9000, "chunk_size": 256}
HEAD = "family          reading: native  transformers  ratio   writing: native  transformers  ratio"
NUM_READ, NUM_WRITTEN, NUM_ROUNDS = 1024, 32, 3
HYBRIDS = ("qwen3-next", "qwen3.5", "bamba", "granite-hybrid", "lfm2", "lfm2-moe", "nemotron-h", "falcon-h1")


def load(name: str, folder: Path, **settings: Any) -> Engine:
    engine, family = Engine.load(str(folder), **(SETTINGS | settings)), FAMILIES[name]
    if engine.lane.reads_images:
        processor = PictureProcessor(family, NUM_READ - family.image_tokens - 1)
        engine.model.lane.processor = MediaProcessor(processor)
    return engine


def ask(engine: Engine, name: str) -> Output:
    if FAMILIES[name].image is None:
        return engine.generate(text_tokens(NUM_READ), ignore_eos=True, max_tokens=NUM_WRITTEN)
    return engine.generate("<image>", images=pictures(1), ignore_eos=True, max_tokens=NUM_WRITTEN)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_lanes_read_the_same_prompt_and_their_speeds_are_told(name, tmp_path, head):
    """Medians of tokens per second, of runs that take turns."""
    save_family(name, tmp_path)
    generic = GENERIC_TEXT if FAMILIES[name].image is None else GENERIC_MULTIMODAL
    read: list[list[float]] = [[], []]
    written: list[list[float]] = [[], []]
    num_prompt = set()
    with (
        load(name, tmp_path, prefix_cache=False) as ours,
        load(name, tmp_path, prefix_cache=False, lane=generic) as theirs,
    ):
        assert ours.lane.id.startswith("optimized-native")
        for round_number in range(NUM_ROUNDS + 1):
            for index, engine in enumerate((ours, theirs)):
                output = ask(engine, name)
                num_prompt.add(output.num_prompt_tokens)
                assert len(output.token_ids) == NUM_WRITTEN
                if round_number:  # the first one warms up
                    read[index].append(output.num_prompt_tokens / output.prefill_s)
                    written[index].append((NUM_WRITTEN - 1) / output.decode_s)
    assert len(num_prompt) == 1
    (ours_in, theirs_in), (ours_out, theirs_out) = (map(statistics.median, both) for both in (read, written))
    print(
        f"{name:<15} {ours_in:>15.0f} {theirs_in:>13.0f} {ours_in / theirs_in:>6.2f} {ours_out:>17.1f} "
        f"{theirs_out:>13.1f} {ours_out / theirs_out:>6.2f}",
        flush=True,
    )


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_second_question_about_a_document_is_answered_alike_and_reads_little(name, tmp_path):
    document, first, second = (text_tokens(n, seed) for n, seed in ((2000, 1), (30, 2), (40, 3)))
    save_family(name, tmp_path)
    asked: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    with load(name, tmp_path) as engine:
        cold = engine.generate([*document, *second], **asked)
    with load(name, tmp_path) as engine:
        engine.generate([*document, *first], **asked)
        warm = engine.generate([*document, *second], **asked)
    num_read = warm.num_prompt_tokens - warm.num_cached_tokens
    print(
        f"\n{name}: {warm.num_prompt_tokens} tokens, {num_read} of them read, {cold.prefill_s * 1e3:.0f} ms cold, "
        f"{warm.prefill_s * 1e3:.0f} ms warm",
        flush=True,
    )
    assert warm.token_ids == cold.token_ids
    assert num_read < warm.num_prompt_tokens / 4


# --- the table in the documentation ---------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "families.json"
NUM_DOCUMENT, NUM_ASKED, CHUNK = 96, 9, 7


def test_every_family_of_the_field_is_told_with_its_lane_and_what_its_second_request_reads(tmp_path):
    """Tiny models with random weights, saved by their own class. Writes the file that the documentation shows."""
    rows = []
    for model_type in [*MADE_BY_TYPE, *(kind for kind in FIELD if kind not in MADE_BY_TYPE)]:
        try:
            row = told(model_type, tmp_path / model_type)
        except CannotBuild as error:
            row = {"model_type": model_type, "lane": "", "reason": str(error)}
        print(row, flush=True)
        rows.append(row)
    TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    assert not [row for row in rows if row["lane"] and not row["is_exact"]]


def told(model_type: str, folder: Path) -> dict[str, Any]:
    """Of a family whose images nothing reads in chunks, its text part."""
    model = field_model(model_type)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    try:
        return read_by(model, folder, text_only=False)
    except UnsupportedModel:
        return read_by(model, folder, text_only=True)


def read_by(model: Any, folder: Path, **settings: Any) -> dict[str, Any]:
    asked = [[*words(NUM_DOCUMENT, 1), *words(NUM_ASKED, seed)] for seed in (2, 3, 4)]
    settings |= {"dtype": "float32", "threads": 1, "memory": "6GiB", "chunk_size": CHUNK, "context": 160}
    with Engine.load(str(folder), **settings) as engine:
        num_right, num_cached = 0, 0
        for tokens in asked:
            recorder = LogitRecorder(engine)
            output = engine.generate(tokens, max_tokens=1, ignore_eos=True)
            recorder.remove()
            true_V = reference_logits(model, tokens)[-1]
            num_right += bool((recorder.all[-1] - true_V).abs().max() <= 1e-4 * max(1.0, float(true_V.std())))
            num_cached = output.num_cached_tokens
        facts = engine.lane.after_reading(-(-NUM_DOCUMENT // CHUNK))
        shape = engine.model.memory.shape
    return {
        "model_type": folder.name,
        "lane": facts.id,
        "applied": facts.applied,
        "is_exact": num_right >= 2,  # near-tied routers flip on rounding
        "hit_tokens": num_cached,
        "prompt_tokens": NUM_DOCUMENT + NUM_ASKED,
        "kv_bytes_per_token": shape.kv_bytes_per_token - shape.state_bytes_per_token,  # without rows of images
        "cache_bytes_per_token": bytes_of_a_cache(model),
        "reason": facts.reason.replace(str(folder), "the folder"),
    }


def words(num_tokens: int, seed: int) -> list[int]:
    """Tokens that stand for no image."""
    return [3 + token % 180 for token in prompt(num_tokens, seed=seed)]


@torch.no_grad()
def bytes_of_a_cache(model: Any) -> int:
    """Counts what transformers keeps of a token: keys and values of all heads in all layers that have any."""
    cache = model(input_ids=torch.tensor([words(8, 1)]), use_cache=True).past_key_values
    kept = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    pairs = [part for pair in kept for part in pair if isinstance(part, torch.Tensor) and part.ndim == 4]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in pairs)
