"""Our router beside Ray's power of two, in turns, on two replicas of one model with traffic as of agents.

    python scripts/ray_routers.py --pairs 3 --sessions 12

Both run in one cluster on the same replicas, whose caches are emptied before each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import httpx
import uvicorn
from ray import serve
from ray.serve.config import RequestRouterConfig

from penstock.config import load_config
from penstock.ray import fleet
from penstock.ray.replica import ROUTERS
from penstock.ray.routing import FirstTokenRouter
from penstock.server.settings import ServerSettings
from penstock.trace.percentile import percentile

WORDS = ["river", "stone", "light", "paper", "garden", "window", "silver", "morning", "engine", "market"]


class SwitchedRouter(FirstTokenRouter):
    """Ours, or of two replicas the one with the shorter queue, as Ray asks them."""

    is_two_choices = False

    async def choose_replicas(self, candidate_replicas: list, pending_request: Any = None) -> list:
        named = None if pending_request is None else pending_request.kwargs.get("replica")
        if self.is_two_choices and named is None:
            return [list(candidate_replicas)]
        return await super().choose_replicas(candidate_replicas, pending_request)


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


async def run(client: httpx.AsyncClient, seed: int, given: argparse.Namespace) -> tuple[int, int, list[float], float]:
    """Sessions of agents, some at once; the next begins when one ends."""
    rng = random.Random(seed)
    kinds = [text(random.Random(1000 * seed + number), given.instructions) for number in range(given.kinds)]
    weights = [(rank + 1) ** -1.1 for rank in range(given.kinds)]
    plans = [(rng.choices(kinds, weights)[0], rng.getrandbits(30)) for _ in range(given.sessions)]
    ttfts: list[float] = []
    counts = [0, 0]
    room = asyncio.Semaphore(given.at_once)

    async def session(instructions: str, number: int) -> None:
        own = random.Random(number)
        async with room:
            prompt = f"{instructions}\n{text(own, 40)}"
            for _ in range(given.turns):
                began, first, answer = time.perf_counter(), None, ""
                body = {"model": "smollm2", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": True}
                body |= {"temperature": 0, "stream_options": {"include_usage": True}}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        document = json.loads(line.removeprefix("data: "))
                        if document.get("choices"):
                            first = first or time.perf_counter()
                            answer += document["choices"][0]["text"]
                        elif usage := document.get("usage"):
                            counts[0] += usage["prompt_tokens"]
                            counts[1] += usage["prompt_tokens_details"]["cached_tokens"]
                ttfts.append((first or time.perf_counter()) - began)
                prompt += answer + "\n" + text(own, 60)
                await asyncio.sleep(own.uniform(0.1, 0.4))

    began = time.perf_counter()
    await asyncio.gather(*(session(*plan) for plan in plans))
    return counts[0], counts[1], ttfts, time.perf_counter() - began


async def measure(given: argparse.Namespace) -> None:
    settings, config = ServerSettings(model="smollm2"), load_config({"memory": given.memory, "threads": 1})
    plan = fleet.FleetSettings(min_replicas=2, max_replicas=2)
    router = RequestRouterConfig(request_router_class=SwitchedRouter, request_routing_stats_period_s=1.0)
    deployment = fleet._deployment(settings, config, plan).options(request_router_config=router)
    handle = serve.run(deployment.bind(settings, config), name="smollm2", route_prefix=None)
    app = fleet._front([settings], config, {"smollm2": handle})
    server = uvicorn.Server(uvicorn.Config(app, port=given.port, log_level="error", lifespan="on"))
    serving = asyncio.create_task(server.serve())
    while not (hasattr(app.state, "loading") and app.state.loading.done()):
        await asyncio.sleep(0.1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{given.port}", timeout=300) as client:
        for name in ("two choices", "first token") * given.pairs:
            ROUTERS["smollm2"].is_two_choices = name == "two choices"
            for replica in ROUTERS["smollm2"].names:
                (await client.post("/reset_prefix_cache", json={}, params={"replica": replica})).raise_for_status()
            await asyncio.sleep(2.0)  # until the news tell of it
            given.seed += name == "two choices"
            prompts, hits, ttfts, seconds = await run(client, given.seed, given)
            print(
                f"{name:12} seed {given.seed}: {len(ttfts)} requests, hit {hits:,} of {prompts:,} tokens "
                f"({hits / prompts:.1%}), first token p50 {percentile(ttfts, 0.5):.3f} s p99 "
                f"{percentile(ttfts, 0.99):.3f} s, {seconds:.1f} s in all",
                flush=True,
            )
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    values = {"pairs": 3, "sessions": 12, "turns": 4, "kinds": 5, "instructions": 700, "at-once": 4, "seed": 0}
    for name, value in (values | {"port": 18_433}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--memory", default="900MB")
    given = parser.parse_args()
    fleet.join(2)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        asyncio.run(measure(given))
    finally:
        serve.shutdown()
        fleet.ray.shutdown()


if __name__ == "__main__":
    main()
