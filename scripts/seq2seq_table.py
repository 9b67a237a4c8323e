"""Encoder-decoder models read in tiles, beside the plain models of transformers: exactness, then memory.

Prints for every architecture the largest differences of encoder states and of decoder logits over all tiles, and
whether 32 greedy tokens are equal; then the peak of reading long sources, each in a fresh process. Exits with 1 if a
bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from logit_recorder import LogitRecorder
from tiny_models import prompt, save_tokenizer
from tiny_seq2seq import SEQ2SEQ, save_tiny_seq2seq

from penstock.engine.engine import Engine
from penstock.lanes.source_encoder import read_source

MB = 1e6
TOLERANCE = 1e-4
TILES, LONG_TILES = (1, 3, 7, 64), (64, 256, 1024)
NUM_TOKENS, NUM_LONG_TOKENS, NUM_WRITTEN = 150, 4096, 32
LENGTHS, TILE, WIDTH = (2048, 4096, 8192, 16384), 256, 512
PLAIN_LENGTH, PLANNED_LENGTH = 8192, 2048
LARGEST_GAP = 0.10  # of the measured peak
LEAST_RATIO = {"t5": 8.0, "bart": 2.5}
# What a source may take beyond its states: a fixed part, and a part for each token that is far below a state.
MOST_BEYOND_BYTES, MOST_BEYOND_BYTES_PER_TOKEN = 32 * MB, 512


def states(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.get_encoder()(ids, attention_mask=torch.ones_like(ids)).last_hidden_state


def show_exactness(name: str, folder: Path) -> bool:
    model = save_tiny_seq2seq(name, folder)
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
        with Engine.load(str(folder), chunk_size=tile, dtype="float32", memory="4GiB") as engine:
            lane = engine.model.source
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
    holds = max(state_gap, logit_gap, long_gap) <= TOLERANCE and equal and applied
    print(
        f"{name:<16} {state_gap:>9.1e} {long_gap:>9.1e} {logit_gap:>9.1e} {'equal' if equal else 'OTHER':>7} "
        f"{'yes' if applied else 'NO':>8}   {'exact' if holds else 'FAILED'}",
        flush=True,
    )
    return holds


# --- memory, each cell in a process of its own ---------------------------------------------------------------


def bart_config(num_layers: int, num_positions: int) -> transformers.PretrainedConfig:
    return transformers.BartConfig(
        d_model=WIDTH,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=num_positions,
    )


def long_model(kind: str) -> transformers.PreTrainedModel:
    """Two layers: the peak of reading does not depend on their number."""
    if kind == "t5":
        config = transformers.T5Config(num_layers=2, num_decoder_layers=1, vocab_size=1000, decoder_start_token_id=0)
    else:
        config = bart_config(2, max(LENGTHS))
    return transformers.AutoModelForSeq2SeqLM.from_config(config).eval()


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure_here(kind: str, length: int, way: str) -> None:
    """Prints the bytes that reading adds to the loaded model at its peak."""
    model = long_model(kind)
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    read_source(model, ids[:, :64], tile=32)  # what the first use loads is not the source's
    states(model, ids[:, :64])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_bytes("VmRSS")
    hidden = states(model, ids) if way == "plain" else read_source(model, ids, tile=TILE)
    assert hidden.shape == (1, length, WIDTH)
    print(status_bytes("VmHWM") - before)


def measure(kind: str, length: int, way: str) -> int:
    command = [sys.executable, __file__, "--cell", kind, str(length), way]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def show_memory(kind: str) -> bool:
    state_bytes = 3 * WIDTH * 4  # hidden states, keys and values of one layer, in float32
    beyond: dict[int, float] = {}
    totals: dict[int, int] = {}
    for length in LENGTHS:
        totals[length] = measure(kind, length, "tiles")
        beyond[length] = totals[length] - length * state_bytes
        print(
            f"{kind:<6} {length:>7} {totals[length] / MB:>9.1f} {length * state_bytes / MB:>9.1f} "
            f"{beyond[length] / MB:>9.1f}",
            flush=True,
        )
    plain = measure(kind, PLAIN_LENGTH, "plain")
    ratio = plain / totals[PLAIN_LENGTH]
    is_linear = all(
        value <= MOST_BEYOND_BYTES + MOST_BEYOND_BYTES_PER_TOKEN * length for length, value in beyond.items()
    )
    holds = is_linear and ratio >= LEAST_RATIO[kind]
    print(
        f"{kind:<6} {PLAIN_LENGTH:>7} plain {plain / MB:.1f} MB, {ratio:.1f} times (at least {LEAST_RATIO[kind]}); "
        f"linear: {'yes' if is_linear else 'NO'}   {'holds' if holds else 'FAILED'}",
        flush=True,
    )
    return holds


# --- the plan and the measurement ----------------------------------------------------------------------------


def printed_json(*arguments: str) -> dict:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def show_prediction(kind: str, folder: Path) -> bool:
    """A whole run of the command, with a model of the usual size."""
    model_class = transformers.AutoModelForSeq2SeqLM
    config = transformers.T5Config(decoder_start_token_id=0) if kind == "t5" else bart_config(6, PLANNED_LENGTH)
    model_class.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    source = folder / "source.txt"
    source.write_text(" ".join(f"w{token}" for token in prompt(PLANNED_LENGTH)))
    settings = ["--chunk-size", "128", "--threads", "1"]
    plan = printed_json("plan", str(folder), "--prompt-tokens", str(PLANNED_LENGTH), *settings)
    run = printed_json("run", str(folder), "-f", str(source), "--max-tokens", "2", *settings)
    measured, predicted = run["peak_bytes"]["measured"], run["peak_bytes"]["predicted"]
    gap = max(abs(plan["peak_bytes"] / measured - 1), abs(predicted / measured - 1))
    holds = gap <= LARGEST_GAP and run["lane"]["applied"]
    print(
        f"{kind:<6} {PLANNED_LENGTH:>7} plan {plan['peak_bytes'] / MB:.1f} MB, predicted {predicted / MB:.1f}, "
        f"measured {measured / MB:.1f} in chunks of {run['plan']['chunk_size']}: {gap:.1%} apart (at most "
        f"{LARGEST_GAP:.0%})   {'holds' if holds else 'FAILED'}",
        flush=True,
    )
    return holds


def new_folder(parent: str, name: str) -> Path:
    folder = Path(parent) / name
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", nargs=3, metavar=("KIND", "LENGTH", "WAY"), help="One measurement, in this process.")
    parser.add_argument("--only", choices=["exactness", "memory", "plan"], help="One part of the table.")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.cell:
        kind, length, way = arguments.cell
        measure_here(kind, int(length), way)
        return
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float32")
    holds: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only in (None, "exactness"):
            print(f"{NUM_TOKENS} tokens in tiles of {TILES}; {NUM_LONG_TOKENS} in tiles of {LONG_TILES}\n")
            print("architecture        states long st.    logits  tokens in tiles   verdict")
            holds += [show_exactness(name, new_folder(folder, name)) for name in SEQ2SEQ]
        if arguments.only in (None, "memory"):
            print(f"\nPeak over the loaded model in MB, width {WIDTH}, tiles of {TILE}")
            print("shape   tokens     total    states    beyond")
            holds += [show_memory(kind) for kind in LEAST_RATIO]
        if arguments.only in (None, "plan"):
            print("\nPeak of the whole process, planned and measured")
            holds += [show_prediction(kind, new_folder(folder, f"{kind}-512")) for kind in LEAST_RATIO]
    sys.exit(not all(holds))


if __name__ == "__main__":
    main()
