"""What a long prompt does to a chat beside it: the gaps between the chat's tokens, without and with a latency target.

python examples/stall_demo.py --prompt-tokens 6000 --latency-target-ms 150
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import httpx

MAX_OVER_TARGET = 1.2


@contextmanager
def server(model: str, *arguments: str) -> Iterator[str]:
    """The address of a server of our own, on a free port."""
    command = [sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0"]
    command += ["--drain-timeout-s", "0.1", *arguments]  # the chat is not waited for
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    url = next(found[1] for line in lines if (found := re.search(r"at (http://\S+)", line)))
    threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
    try:
        yield url
    finally:
        process.terminate()
        process.wait()


def token_times(url: str, model: str, num_tokens: int, times: list[float]) -> None:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": num_tokens, "temperature": 0}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"ignore_eos": True, "stream": True}, timeout=600
    ) as response:
        for line in response.iter_lines():
            part = json.loads(line[6:]) if line.startswith("data: {") else {}
            if any(choice["finish_reason"] is None for choice in part.get("choices", ())):  # the end is an error event
                times.append(time.perf_counter())


def gaps_beside_a_prompt(url: str, model: str, prompt_tokens: int) -> tuple[list[float], float]:
    """(gaps of the chat in ms, from the one in which the prompt came; seconds until the prompt's first token)."""
    times: list[float] = []
    chat = threading.Thread(target=token_times, args=(url, model, 4000, times), daemon=True)
    chat.start()
    while len(times) < 20:
        time.sleep(0.01)
    words = [100 + i % 1000 for i in range(prompt_tokens)]
    began = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": words, "max_tokens": 1}, timeout=600)
    ended = time.perf_counter()
    return [(b - a) * 1e3 for a, b in pairwise(times) if began <= b <= ended], ended - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--latency-target-ms", type=float, default=150)
    asked = parser.parse_args()
    for arguments in ((), ("--latency-target-ms", str(asked.latency_target_ms))):
        with server(asked.model, *arguments) as url:
            gaps, seconds = gaps_beside_a_prompt(url, asked.model, asked.prompt_tokens)
        gaps.sort()
        if not gaps:
            print(f"{' '.join(arguments) or 'no target':>26}: the chat stood still for {seconds:.1f} s")
            continue
        p50, p99 = gaps[len(gaps) // 2], gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]
        print(
            f"{' '.join(arguments) or 'no target':>26}: {len(gaps)} gaps, median {p50:.0f} ms, p99 {p99:.0f} ms, "
            f"largest {gaps[-1]:.0f} ms; the prompt took {seconds:.1f} s"
        )
    is_kept = bool(gaps) and p99 <= MAX_OVER_TARGET * asked.latency_target_ms
    print(f"p99 within {MAX_OVER_TARGET} targets: {'yes' if is_kept else 'no'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
