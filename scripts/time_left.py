"""Prints how far off the time left is while a long prompt is read: at 10, 30, 50 and 70 % of it.

Beside it stands what dividing by the average speed would have said. Run it from the repository, on a quiet machine:
.venv/bin/python scripts/time_left.py [MODEL] [--tokens N]
"""

from __future__ import annotations

import argparse
import os
import time

from penstock.engine.engine import Engine
from penstock.prompt.random_tokens import random_tokens
from penstock.request import PrefillProgress

SHARES = (0.1, 0.3, 0.5, 0.7)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("model", nargs="?", default="smollm2")
    asked.add_argument("--tokens", type=int, default=22_124)
    asked.add_argument("--chunk-size", default="auto")
    arguments = asked.parse_args()
    num_tokens = arguments.tokens
    with Engine.load(arguments.model, context=num_tokens + 64, chunk_size=arguments.chunk_size) as engine:
        prompt = random_tokens(num_tokens, seed=0, end=engine.model.spec.vocab_size)
        began = time.perf_counter()
        seen = [
            (event.num_computed, time.perf_counter() - began, event.eta_s)
            for event in engine.stream(prompt, max_tokens=1)
            if isinstance(event, PrefillProgress)
        ]
        took = seen[-1][1]
    load = os.getloadavg()[0]
    print(f"{arguments.model}: {num_tokens:,} tokens in {len(seen)} chunks, {took:.1f} s, load {load:.1f}")
    print("read   to go     said   error   by the average")
    for share in SHARES:
        num_read, elapsed, said = next(one for one in seen if one[0] >= share * num_tokens)
        rest = took - elapsed
        average = elapsed * (num_tokens - num_read) / num_read
        read = num_read / num_tokens
        print(f"{read:4.0%} {rest:6.1f} s {said:6.1f} s {said / rest - 1:+7.0%} {average / rest - 1:+11.0%}")


if __name__ == "__main__":
    main()
