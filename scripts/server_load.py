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
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from server_process import ServerProcess, serving  # noqa: E402
from tiny_models import VOCABULARY, save_tiny_model  # noqa: E402


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


async def keep_streaming(server: ServerProcess, model: str, num_streams: int, seconds: float) -> Counter[str]:
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def worker(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            ends[await stream(client, model)] += 1

    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(worker(client) for _ in range(num_streams)))
    return ends


async def leave_early(server: ServerProcess, model: str, num_clients: int) -> None:
    """Each client leaves at a random moment, most of them while their prompt is read."""

    async def visit(client: httpx.AsyncClient) -> None:
        body = {"model": model, "prompt": tokens(900), "max_tokens": 50, "stream": random.random() < 0.5}
        timeout = httpx.Timeout(30, read=random.uniform(0.01, 0.4))
        try:
            async with client.stream("POST", "/v1/completions", json=body, timeout=timeout) as response:
                async for _ in response.aiter_lines():
                    pass
        except httpx.ReadTimeout:
            pass

    for _ in range(num_clients // 20):
        async with httpx.AsyncClient(base_url=server.url) as client:
            await asyncio.gather(*(visit(client) for _ in range(20)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--visitors", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model("llama", Path(folder))
        with serving(folder, "--dtype", "float32", "--chunk-size", "64", "--memory", "400MiB") as server:
            asyncio.run(
                keep_streaming(server, folder, asked.streams, min(20, asked.seconds / 5))
            )  # everything is touched
            before = resident_mb(server)
            ends = asyncio.run(keep_streaming(server, folder, asked.streams, asked.seconds))
            print(f"{asked.streams} streams for {asked.seconds:.0f} s: {dict(ends)}")
            print(f"resident memory: {before:.1f} MB at first, {resident_mb(server):.1f} MB at last")
            asyncio.run(leave_early(server, folder, asked.visitors))
            assert server.metric_becomes("num_requests_running", 0, timeout_s=60)
            print(
                f"{asked.visitors} visitors: {server.metric('request_cancelled_total'):.0f} left early; "
                f"blocks held afterwards: {server.metric('kv_cache_usage_perc'):.0%}; {resident_mb(server):.1f} MB"
            )
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"model": folder, "prompt": [5, 6, 7], "max_tokens": 4}, timeout=30
            )
            print("still answers:", answer.status_code == 200, "- exit code", server.terminate())


if __name__ == "__main__":
    main()
