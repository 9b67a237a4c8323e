"""Times the choice of tokens on this GPU: the likeliest, and draws from flat and from peaked logits.

    python benchmarks/h200/sampling_kernels.py [--vocabulary 151936]

Each line has microseconds per step of so many rows, and how many draws equal those of the CPU. Launches are queued
behind a long product and timed by events, so that the host is not measured.
"""

from __future__ import annotations

import argparse

import torch

from penstock.engine.draws import Draw, draw_tokens, likeliest, numbers_of
from penstock.request import SamplingParams

NUM_RUNS, NUM_ROUNDS = 20, 5
ASKS = {
    "0.8": SamplingParams(temperature=0.8),
    "0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "0.8, min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "0.8, top-k 50, top-p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}


def logits_of(kind: str, num_rows: int, size: int) -> torch.Tensor:
    """Flat: all tokens are about alike. Peaked: about fifty have nearly all of the probability."""
    logits = torch.randn(num_rows, size, device="cuda") * 0.01
    if kind == "peaked":
        places = torch.randint(size, (num_rows, 50), device="cuda")
        logits.scatter_(1, places, 14 + torch.rand(num_rows, 50, device="cuda"))
    return logits


def microseconds(work) -> float:
    for _ in range(3):
        work()
    ballast = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rounds = []
    for _ in range(NUM_ROUNDS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(4):
            ballast @ ballast
        begun.record()
        for _ in range(NUM_RUNS):
            work()
        ended.record()
        torch.cuda.synchronize()
        rounds.append(begun.elapsed_time(ended) * 1e3 / NUM_RUNS)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151936)
    size = parser.parse_args().vocabulary
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vocabulary {size}", flush=True)
    print(f"{'rows':>5} {'logits':8} {'asked':28} {'us':>9} {'argmax us':>10}  equal to CPU", flush=True)
    for num_rows in (1, 64, 256):
        for kind in ("flat", "peaked"):
            logits = logits_of(kind, num_rows, size)
            greedy = microseconds(lambda logits=logits: likeliest(logits))
            for name, params in ASKS.items():
                draws = [Draw.of(params, 7, place) for place in range(num_rows)]
                numbers = torch.from_numpy(numbers_of(draws)).cuda()
                taken = microseconds(lambda given=(logits, numbers, draws): draw_tokens(*given))
                few = min(num_rows, 16)
                ours = draw_tokens(logits, numbers, draws)[:few].tolist()
                theirs = draw_tokens(logits[:few].cpu(), numbers[:, :few].cpu(), draws[:few]).tolist()
                same = sum(a == b for a, b in zip(ours, theirs, strict=True))
                print(f"{num_rows:5} {kind:8} {name:28} {taken:9.1f} {greedy:10.1f}  {same}/{few}", flush=True)


if __name__ == "__main__":
    main()
