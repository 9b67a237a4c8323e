"""Peak memory, planned and measured: every row is a fresh `penstock run`, with the default model or one of a family."""

import random
import sys
from pathlib import Path

import pytest
from family_models import FAMILIES, save_family
from peaks import LARGEST_GAP, MB, peak_of, printed_json

from penstock.engine.loading import load_tokenizer
from penstock.models.files import resolve

HEAD = "format    chunk  tokens  plan MB   run MB measured     gap beyond KV"
SHORT_PROMPT, LENGTHS = 200, (1000, 4000, 16000)
MAX_BEYOND_KV = 64 * MB  # at 16k tokens
MAX_GROWTH = 16 * MB  # from 4k to 16k tokens
FORMATS = {
    "auto": [],
    "bfloat16": ["--dtype", "bfloat16", "--quantize", "none"],
    "float32": ["--dtype", "float32"],
}
FAMILY_KINDS = {"qwen3.5": "hybrid", "qwen3-moe": "experts", "llava": "images"}
NUM_IMAGES = 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[int, Path]:
    """Words of one token each, in a seeded order, so that a prompt has about that many tokens."""
    backend = load_tokenizer(resolve("smollm2")).backend
    decoded = (backend.decode([token]) for token in range(1000, 9000))
    words = [word for word in decoded if word.startswith(" ") and word[1:].isalpha()]
    folder, found = tmp_path_factory.mktemp("texts"), {}
    for length in (SHORT_PROMPT, *LENGTHS):
        generator = random.Random(length)
        found[length] = folder / f"{length}.txt"
        found[length].write_text("".join(generator.choice(words) for _ in range(length)), encoding="utf-8")
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk_size", [64, 256, 1024])
@pytest.mark.parametrize("weights", FORMATS)
def test_the_plan_of_the_default_model_is_its_peak(weights, chunk_size, texts, head):
    settings = [*FORMATS[weights], "--chunk-size", str(chunk_size), "--context", "20000", "--threads", "2"]
    short = peak_of(source=str(texts[SHORT_PROMPT]), settings=settings)
    beyond, wrong = {}, []
    for length in LENGTHS:
        peak = peak_of(source=str(texts[length]), settings=settings)
        beyond[length] = peak.measured - short.measured - (peak.kv_bytes - short.kv_bytes)
        print(
            f"{weights:<9} {chunk_size:>5} {peak.prompt_tokens:>7} {peak.planned / MB:>8.1f} "
            f"{peak.predicted / MB:>8.1f} {peak.measured / MB:>8.1f} {peak.gap:>+7.1%} {beyond[length] / MB:>9.1f}",
            flush=True,
        )
        wrong += [f"{length}: the plan is {peak.gap:+.1%} off"] if abs(peak.gap) > LARGEST_GAP else []
    assert not wrong
    if weights != "float32" and chunk_size == 256:
        assert beyond[16000] <= MAX_BEYOND_KV
        assert beyond[16000] - beyond[4000] <= MAX_GROWTH


@pytest.mark.parametrize("name", FAMILY_KINDS)
def test_the_plan_of_a_family_is_its_peak_beyond_weights_and_cache(name, tmp_path):
    """The engine's plan knows the runtime that it measured at load; `penstock plan` estimates it, from far."""
    save_family(name, tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("family_memory.py")), str(tmp_path)]
    if (per_image := FAMILIES[name].image_tokens) > 0:
        command += ["--images", str(NUM_IMAGES), "--tokens-per-image", str(per_image)]
    cell = printed_json(command)
    gaps = {key: cell[key] / cell["measured"] - 1 for key in ("planned", "in_engine")}
    planned, in_engine, measured, kept = (cell[key] / MB for key in ("planned", "in_engine", "measured", "kept"))
    print(
        f"\n{name:<12} {FAMILY_KINDS[name]:<8} plan {planned:.1f} MB {gaps['planned']:+.1%}, engine's plan "
        f"{in_engine:.1f} MB {gaps['in_engine']:+.1%}, measured {measured:.1f}, of the process {measured + kept:.1f}",
        flush=True,
    )
    assert cell["lane"].startswith("optimized-native")
    assert max(map(abs, gaps.values())) <= LARGEST_GAP
