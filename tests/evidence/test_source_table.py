"""Encoder-decoder models read in tiles, beside the plain models of transformers: exactness, then memory.

Every architecture is shown with the largest differences of encoder states and of decoder logits over all tiles; then
the peak of reading long sources, each in a fresh process.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from logit_recorder import LogitRecorder
from peaks import LARGEST_GAP, MB, peak_of
from source_memory import LENGTHS, TILE, WIDTH, bart_config, states
from tiny_models import prompt, save_tokenizer
from tiny_seq2seq import SEQ2SEQ, save_tiny_seq2seq

from penstock.engine.engine import Engine
from penstock.foreign.source_encoder import read_source

TOLERANCE = 1e-4
TILES, LONG_TILES = (1, 3, 7, 64), (64, 256, 1024)
NUM_TOKENS, NUM_LONG_TOKENS, NUM_WRITTEN = 150, 4096, 32
PLAIN_LENGTH, PLANNED_LENGTH = 8192, 2048
LEAST_RATIO = {"t5": 8.0, "bart": 2.5}
# What a source may take beyond its states: a fixed part, and a part for each token that is far below a state.
MAX_BEYOND_BYTES, MAX_BEYOND_BYTES_PER_TOKEN = 32 * MB, 512


HEAD = (
    f"transformers {transformers.__version__}, torch {torch.__version__}, float32; {NUM_TOKENS} tokens in tiles of "
    f"{TILES}, {NUM_LONG_TOKENS} in tiles of {LONG_TILES}; peaks over the loaded model, width {WIDTH}, tiles of {TILE}"
)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_tiles_give_the_states_logits_and_tokens_of_the_plain_model(name, tmp_path, head):
    torch.set_num_threads(1)
    model = save_tiny_seq2seq(name, tmp_path)
    ids, long_ids = torch.tensor([prompt(NUM_TOKENS)]), torch.tensor([prompt(NUM_LONG_TOKENS, seed=7)])
    result = model.generate(
        ids,
        max_new_tokens=NUM_WRITTEN,
        min_new_tokens=NUM_WRITTEN,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    expected = result.sequences[0, -NUM_WRITTEN:].tolist()
    state_gap = logit_gap = 0.0
    equal = applied = True
    reference = states(model, ids)
    for tile in TILES:
        state_gap = max(state_gap, float((read_source(model, ids, tile=tile) - reference).abs().max()))
        with Engine.load(str(tmp_path), chunk_size=tile, dtype="float32", memory="4GiB") as engine:
            lane = engine.model.lane
            assert lane is not None
            object.__setattr__(lane.rules, "never", (2,))  # no end, as `generate` was told
            recorder = LogitRecorder(engine)
            output = engine.generate(prompt(NUM_TOKENS), max_tokens=NUM_WRITTEN)
            applied = applied and engine.lane.after_reading(output.num_prompt_chunks).applied
        logits = recorder.all
        gaps = (logits - torch.cat(result.logits)).abs()[logits.isfinite()]
        logit_gap = max(logit_gap, float(gaps.max()))
        equal = equal and list(output.token_ids) == expected
    reference = states(model, long_ids)
    long_gap = max(float((read_source(model, long_ids, tile=tile) - reference).abs().max()) for tile in LONG_TILES)
    print(
        f"{name:<16} states {state_gap:.1e}, of long sources {long_gap:.1e}, logits {logit_gap:.1e}, tokens "
        f"{'equal' if equal else 'OTHER'}, in tiles {'yes' if applied else 'NO'}",
        flush=True,
    )
    assert max(state_gap, logit_gap, long_gap) <= TOLERANCE
    assert equal
    assert applied


# --- memory, each row in a process of its own ----------------------------------------------------------------


def measure(kind: str, length: int, way: str) -> int:
    command = [sys.executable, str(Path(__file__).with_name("source_memory.py")), kind, str(length), way]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("kind", LEAST_RATIO)
def test_a_source_takes_its_states_and_little_beyond(kind):
    state_bytes = 3 * WIDTH * 4  # hidden states, keys and values of one layer, in float32
    totals = {length: measure(kind, length, "tiles") for length in LENGTHS}
    for length, total in totals.items():
        beyond = total - length * state_bytes
        print(f"\n{kind:<6} {length:>7} {total / MB:>9.1f} MB, {beyond / MB:.1f} beyond its states", end="", flush=True)
        assert beyond <= MAX_BEYOND_BYTES + MAX_BEYOND_BYTES_PER_TOKEN * length
    plain = measure(kind, PLAIN_LENGTH, "plain")
    ratio = plain / totals[PLAIN_LENGTH]
    print(f"\n{kind:<6} {PLAIN_LENGTH:>7} {plain / MB:>9.1f} MB plain, {ratio:.1f} times", flush=True)
    assert ratio >= LEAST_RATIO[kind]


@pytest.mark.parametrize("kind", LEAST_RATIO)
def test_the_plan_of_a_source_is_its_peak(kind, tmp_path):
    """A whole run of the command, with a model of the usual size."""
    config = transformers.T5Config(decoder_start_token_id=0) if kind == "t5" else bart_config(6, PLANNED_LENGTH)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    source = tmp_path / "source.txt"
    source.write_text(" ".join(f"w{token}" for token in prompt(PLANNED_LENGTH)))
    peak = peak_of(str(tmp_path), source=str(source), settings=["--chunk-size", "128", "--threads", "1"])
    print(
        f"\n{kind:<6} {PLANNED_LENGTH:>7} plan {peak.planned / MB:.1f} MB {peak.gap:+.1%}, predicted "
        f"{peak.predicted / MB:.1f} {peak.gap_of_engine:+.1%}, measured {peak.measured / MB:.1f}",
        flush=True,
    )
    assert peak.run["lane"]["applied"]
    assert max(abs(peak.gap), abs(peak.gap_of_engine)) <= LARGEST_GAP
