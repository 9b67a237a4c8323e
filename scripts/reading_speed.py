"""Reading speed beside transformers: the same prompts, one process, interleaved; prints medians and ratios."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from penstock.engine.engine import Engine  # sets OpenMP's wait policy, so it stands before torch

# isort: split
import torch

from penstock.models.files import resolve
from penstock.models.weights import open_weights

VOCABULARY = 49_000


def transformers_model(dtype: torch.dtype) -> torch.nn.Module:
    """The reference with the same weights, filled from the same file."""
    import transformers

    files = resolve("smollm2")
    config = transformers.AutoConfig.for_model(**files.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    source = open_weights(files)
    for name, parameter in model.named_parameters():
        source.copy_into(parameter.data, name)
    return model.eval()


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--chunk-sizes", nargs="+", default=["auto", "256"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    settings = {"dtype": arguments.dtype, "quantize": arguments.quantize, "threads": arguments.threads}
    settings |= {"context": 65_536, "prefix_cache": False}
    engines = {size: Engine.load("smollm2", chunk_size=size, **settings) for size in arguments.chunk_sizes}
    reference = transformers_model(getattr(torch, arguments.dtype))

    @torch.inference_mode()
    def read_reference(tokens: list[int]) -> None:
        reference(torch.tensor([tokens]), logits_to_keep=1)

    for length in arguments.lengths:
        generator = random.Random(length)
        tokens = [generator.randrange(10, VOCABULARY) for _ in range(length)]
        read: dict[str, Callable[[], object]] = {"transformers whole": lambda t=tokens: read_reference(t)}
        for size, engine in engines.items():
            read[f"penstock chunk {size}"] = lambda t=tokens, e=engine: e.generate(t, max_tokens=1)
        for function in read.values():
            function()
        times: dict[str, list[float]] = {name: [] for name in read}
        for _ in range(arguments.repeats):
            for name, function in read.items():
                times[name].append(timed(function))
        base = statistics.median(times["transformers whole"])
        for name, samples in times.items():
            median = statistics.median(samples)
            print(
                f"{arguments.dtype} {length:>6} tokens  {name:<22} {length / median:>7.0f} tok/s  "
                f"{base / median:>5.2f} x transformers  samples {[round(length / s) for s in samples]}"
            )


if __name__ == "__main__":
    main()
