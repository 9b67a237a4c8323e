"""A plain transformers script, run twice in fresh processes: as it is, and with one more line, `penstock.attach`.

    python examples/attach_generate.py --prompt-tokens 3000 --chunk-size 256

Both must write the same tokens. The peaks are the resident memory of each process while `generate` runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

import penstock
from penstock.config import MB
from penstock.foreign.pretrained import causal_class, load_causal
from penstock.models.files import resolve
from penstock.plan.machine import peak_resident_bytes, resident_bytes
from penstock.prompt.load import tokenizer_from_gguf

QUESTION = "\n\nQuestion: what is a penstock?\nAnswer:"


class Variant(BaseModel):
    """What one process measured."""

    token_ids: list[int]
    prompt_tokens: int
    loaded_bytes: int
    peak_bytes: int
    num_chunks: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--variant", choices=["plain", "attached"])
    options = parser.parse_args()
    if options.variant:
        print(run(options).model_dump_json())
        return
    plain, attached = in_fresh_process("plain"), in_fresh_process("attached")
    print(f"prompt: {plain.prompt_tokens} tokens, {len(plain.token_ids)} new tokens")
    for name, variant in (("plain", plain), ("attached", attached)):
        added = variant.peak_bytes - variant.loaded_bytes
        print(
            f"{name:>9}: peak {variant.peak_bytes / MB:.0f} MB, {added / MB:.0f} MB over the loaded model, "
            f"{variant.num_chunks} chunk(s)"
        )
    print(f"same tokens: {plain.token_ids == attached.token_ids}")
    sys.exit(plain.token_ids != attached.token_ids)


def in_fresh_process(variant: str) -> Variant:
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    # Freed tensors go back to the system at once, so that the peaks do not depend on which holes the heap could reuse.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return Variant.model_validate_json(done.stdout)


def run(options: argparse.Namespace) -> Variant:
    model, input_ids = load(options.prompt_tokens)
    attachment = penstock.attach(model, chunk_size=options.chunk_size) if options.variant == "attached" else None
    forget_peak()
    loaded = resident_bytes()

    output = model.generate(input_ids, max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=None)

    return Variant(
        token_ids=output[0, input_ids.shape[1] :].tolist(),
        prompt_tokens=input_ids.shape[1],
        loaded_bytes=loaded,
        peak_bytes=peak_resident_bytes(),
        num_chunks=len(attachment.reading.chunks) if attachment and attachment.reading else 1,
    )


def load(num_tokens: int) -> tuple[Any, torch.Tensor]:
    """SmolLM2 in float32, filled from the installed GGUF file, and a prompt: the license and a question.

    In bfloat16 two roundings of one number can lead to two tokens, whole or in chunks.
    """
    files = resolve("smollm2")
    model = load_causal(files, *causal_class(files), torch.float32, torch.device("cpu"))
    tokenizer = tokenizer_from_gguf(files.gguf.metadata).backend
    license_text = (Path(__file__).parent.parent / "LICENSE").read_text()
    question, text = tokenizer.encode(QUESTION).ids, tokenizer.encode(license_text).ids
    times = -(-num_tokens // len(text))
    return model, torch.tensor([(text * times)[: num_tokens - len(question)] + question])


def forget_peak() -> None:
    """Loading has a peak of its own, which is not the question here. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
