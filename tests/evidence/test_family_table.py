"""Hybrids, mixtures and image models of a small but realistic shape: both lanes, and a document that is asked twice."""

import statistics
from pathlib import Path
from typing import Any

import pytest
from family_models import FAMILIES, PictureProcessor, pictures, save_family, text_tokens
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT

from penstock.engine.engine import Engine
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
