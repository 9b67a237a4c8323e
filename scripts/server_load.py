"""A server under load: mixed streams for some minutes, then clients that leave while their prompts are read.

.venv/bin/python scripts/server_load.py --seconds 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from server_process import ServerProcess, serving  # noqa: E402
from tiny_models import VOCABULARY, save_tiny_model  # noqa: E402

WARM_UP_STEPS = 4096  # as many as the timeline keeps

MAX_GROWTH = 0.02
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def resident_mb(server: ServerProcess) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1e3


def tokens(num: int) -> list[int]:
    return [random.randrange(3, VOCABULARY) for _ in range(num)]


async def stream(client: httpx.AsyncClient, model: str) -> str:
    """One stream; how it ended."""
    wanted = random.choice([1, 4, 16, 64, 200])
    body = {"model": model, "prompt": tokens(random.choice([5, 50, 300, 700])), "max_tokens": wanted}
    num_tokens, last = 0, ""
    async with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True, "return_progress": True}
    ) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                part = json.loads(line.removeprefix("data: "))
                if "error" in part:
                    return "error event"
                num_tokens += sum(choice["finish_reason"] is None for choice in part["choices"])
            last = line or last
    return "complete" if last == "data: [DONE]" and num_tokens == wanted else "cut"


@dataclass(slots=True, kw_only=True)
class Load:
    """How streams ended, and the resident memory in MB, looked at every second."""

    ends: Counter[str] = field(default_factory=Counter)
    resident: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of the last fifth against the first, relative; single looks catch single requests."""
        share = max(1, len(self.resident) // 5)
        return median(self.resident[-share:]) / median(self.resident[:share]) - 1


async def keep_streaming(server: ServerProcess, model: str, num_streams: int, seconds: float) -> Load:
    load = Load()
    ends = load.ends
    until = time.monotonic() + seconds

    async def look() -> None:
        while time.monotonic() < until:
            load.resident.append(resident_mb(server))
            await asyncio.sleep(1)

    async def worker(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            ends[await stream(client, model)] += 1

    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        await asyncio.gather(look(), *(worker(client) for _ in range(num_streams)))
    return load


def warm_up(server: ServerProcess, model: str, num_streams: int) -> None:
    """Until everything is touched that is kept for good: pages, and as many steps as the timeline holds."""
    while server.metric("step_time_seconds_count") < WARM_UP_STEPS:
        asyncio.run(keep_streaming(server, model, num_streams, 10))


async def leave_early(server: ServerProcess, model: str, num_clients: int) -> None:
    """Each client leaves at a random moment, most of them while their prompt is read."""

    async def visit(client: httpx.AsyncClient) -> None:
        path, body = random.choice(
            [
                ("/v1/completions", {"prompt": tokens(900), "max_tokens": 50, "stream": True}),
                ("/v1/completions", {"prompt": tokens(900), "max_tokens": 50, "n": random.choice([1, 3])}),
                ("/v1/embeddings", {"input": [tokens(400), tokens(900)]}),
            ]
        )
        timeout = httpx.Timeout(30, read=random.uniform(0.01, 0.4))
        try:
            async with client.stream("POST", path, json={"model": model} | body, timeout=timeout) as response:
                async for _ in response.aiter_lines():
                    pass
        except httpx.ReadTimeout:
            pass

    for _ in range(num_clients // 20):
        async with httpx.AsyncClient(base_url=server.url) as client:
            await asyncio.gather(*(visit(client) for _ in range(20)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--visitors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="of visitors")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model("llama", Path(folder))
        with serving(folder, "--dtype", "float32", "--chunk-size", "64", "--memory", "400MiB", is_fresh=True) as server:
            warm_up(server, folder, asked.streams)
            load = asyncio.run(keep_streaming(server, folder, asked.streams, asked.seconds))
            is_complete = set(load.ends) == {"complete"}
            print(f"{asked.streams} streams for {asked.seconds:.0f} s: {dict(load.ends)}")
            is_flat = load.growth <= MAX_GROWTH
            looks = load.resident[:: max(1, len(load.resident) // 10)]
            print(f"resident memory: {load.resident[0]:.1f} MB at first, {load.resident[-1]:.1f} MB at last")
            print(
                f"on the way: {', '.join(f'{mb:.0f}' for mb in looks)} MB; flat: {'yes' if is_flat else 'no'}", end=""
            )
            print(f" (the last fifth against the first: {load.growth:+.2%}, allowed {MAX_GROWTH:.0%})")
            for _ in range(asked.rounds):
                asyncio.run(leave_early(server, folder, asked.visitors))
                is_idle = all(server.metric_becomes(name, 0) for name in IDLE)
                print(
                    f"{asked.visitors} visitors: {server.metric('request_cancelled_total'):.0f} requests left so far; "
                    f"nothing runs, waits or is held: {'yes' if is_idle else 'no'}; {resident_mb(server):.1f} MB"
                )
                if not is_idle:
                    return 1
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"model": folder, "prompt": [5, 6, 7], "max_tokens": 4}, timeout=30
            )
            code = server.terminate()
            print("still answers:", answer.status_code == 200, "- exit code", code)
    return 0 if is_complete and is_flat and answer.status_code == 200 and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
