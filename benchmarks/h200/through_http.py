"""Gives a server the full queue of `penstock bench gpu` through HTTP, and the engine alone the same; prints RESULT.

    python benchmarks/h200/through_http.py --shape qwen3-8b
    python benchmarks/h200/through_http.py --shape qwen3-8b --url http://127.0.0.1:8001 --model MODEL

The first runs the engine alone in one process, then `penstock serve --random-weights` in another with the same
settings. The second asks any server with OpenAI's completions; `--write-model FOLDER` writes the shape's config and a
tokenizer for one that makes its own random weights. Clients are processes of their own: while answers come they note
bytes and times, and read them afterwards. Every token is counted, as the server says and as events told of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from penstock.bench.work import CONTEXT, MAX_RUNNING, SHAPES, Work
from penstock.trace.percentile import percentile

LONGEST_START_S = 900.0
SPREAD_S = 1.5  # from when clients are told until they all begin
Request = tuple[list[int], int]  # a prompt, and how many tokens to write


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer as its client saw it; times are on the clock that all processes share."""

    began_at: float
    ended_at: float
    told_tokens: int  # by the server, in its usage
    event_times: tuple[float, ...] = ()  # of what told of tokens; none where the answer came whole
    error: str = ""


class Asker(asyncio.Protocol):
    """A connection that asks once and keeps what comes, with the time of each piece."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self.request, self.ended = request, ended
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.began_at = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self) -> None:
        self.began_at = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.pieces.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def ask_all(url: str, model: str, requests: Sequence[Request], is_streamed: bool, begin_at: float) -> list[Answered]:
    """Asks for all answers at once, each over its own connection; the process of one client."""
    return asyncio.run(_ask_all(url, model, requests, is_streamed, begin_at))


async def _ask_all(
    url: str, model: str, requests: Sequence[Request], is_streamed: bool, begin_at: float
) -> list[Answered]:
    place, loop = urlsplit(url), asyncio.get_running_loop()
    askers: list[Asker] = []
    for prompt, num_tokens in requests:
        ask: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        ask |= {"ignore_eos": True}
        ask |= {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        body = json.dumps(ask).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        asked = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        asker = Asker(asked, loop.create_future())
        await loop.create_connection(lambda asker=asker: asker, place.hostname, place.port)
        askers.append(asker)
    await asyncio.sleep(max(0.0, begin_at - time.perf_counter()))
    for asker in askers:
        asker.ask()
    await asyncio.gather(*(asker.ended for asker in askers))
    return [answered(asker, is_streamed) for asker in askers]


def answered(asker: Asker, is_streamed: bool) -> Answered:
    ended_at = asker.times[-1] if asker.times else time.perf_counter()
    whole = b"".join(asker.pieces)
    head, _, body = whole.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        told = whole[:300].decode(errors="replace")
        return Answered(began_at=asker.began_at, ended_at=ended_at, told_tokens=0, error=told or "no answer")
    ends: list[int] = []
    for piece in asker.pieces:
        ends.append(len(piece) + (ends[-1] if ends else 0))
    times: list[float] = []
    num_told = 0
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    for document, end in documents(body, len(head) + 4, is_chunked=is_chunked, is_streamed=is_streamed):
        if document.get("error"):
            return Answered(began_at=asker.began_at, ended_at=ended_at, told_tokens=0, error=str(document)[:300])
        if document.get("usage"):
            num_told = document["usage"]["completion_tokens"]
        if is_streamed and any(choice.get("text") for choice in document["choices"]):
            times.append(asker.times[bisect_left(ends, end)])
    return Answered(began_at=asker.began_at, ended_at=ended_at, told_tokens=num_told, event_times=tuple(times))


def documents(body: bytes, first: int, *, is_chunked: bool, is_streamed: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """Reads the JSON of an answer or of its events, each with the number of bytes after which it was there."""
    parts = list(_chunks(body, first)) if is_chunked else [(body, first + len(body))]
    if not is_streamed:
        yield json.loads(b"".join(part for part, _ in parts)), parts[-1][1]
        return
    text = b""
    for part, end in parts:
        *lines, text = (text + part.replace(b"\r\n", b"\n")).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: ")), end


def _chunks(body: bytes, first: int) -> Iterator[tuple[bytes, int]]:
    at = 0
    while at < len(body):
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end], 16)
        if size:
            yield body[line_end + 2 : line_end + 2 + size], first + line_end + 2 + size
        at = line_end + 4 + size


def round_of(work: Work, number: int) -> list[Request]:
    """Draws the prompts of the queue anew for each round, so that none was read before; their lengths are the same."""
    return [
        (list(work.tokens(length, 1000 * number + seed)), num_tokens)
        for seed, (length, num_tokens) in enumerate(work.requests())
    ]


def measured(found: Sequence[Answered], requests: Sequence[Request]) -> dict[str, Any]:
    """Tells what a round came to; one that lost an answer or a token is refused."""
    if errors := [one.error for one in found if one.error]:
        sys.exit(f"{len(errors)} of {len(found)} requests failed, the first with: {errors[0]}")
    num_in, num_out = sum(len(prompt) for prompt, _ in requests), sum(count for _, count in requests)
    num_told = sum(one.told_tokens for one in found)
    if num_told != num_out:
        sys.exit(f"The server told of {num_told} tokens; {num_out} were asked for.")
    seconds = max(one.ended_at for one in found) - min(one.began_at for one in found)
    result = {
        "s": seconds,
        "requests": len(found),
        "tin": num_in,
        "tout": num_told,
        "tok_s": (num_in + num_out) / seconds,
    }
    if streamed := [one for one in found if one.event_times]:
        firsts = [one.event_times[0] - one.began_at for one in streamed]
        gaps = [after - before for one in streamed for before, after in pairwise(one.event_times)]
        result |= {"events": sum(len(one.event_times) for one in streamed)}
        result |= {"ttft_p50": percentile(firsts, 0.5), "ttft_p99": percentile(firsts, 0.99)}
        result |= {"gap_p50": percentile(gaps, 0.5), "gap_p99": percentile(gaps, 0.99)}
    return result


def alone(shape: str, work: Work, num_rounds: int) -> list[dict[str, Any]]:
    """Runs the same rounds on an engine without a server; in a process of its own, which leaves nothing behind."""
    from penstock.bench.random_model import random_engine
    from penstock.request import Token

    rounds = []
    with random_engine(SHAPES[shape]) as engine:
        engine.warm_up()
        for number in range(num_rounds + 1):
            requests = round_of(work, number)
            began_at = time.perf_counter()
            ids = [
                engine.submit(prompt, max_tokens=count, temperature=0, ignore_eos=True) for prompt, count in requests
            ]
            times: dict[int, list[float]] = {request_id: [] for request_id in ids}
            while engine.has_work:
                events = engine.step()
                now = time.perf_counter()
                for event in events:
                    if isinstance(event, Token):
                        times[event.request_id].append(now)
            found = [
                Answered(began_at=began_at, ended_at=each[-1], told_tokens=len(each), event_times=tuple(each))
                for each in times.values()
            ]
            rounds.append(measured(found, requests))
    return rounds[1:]


def through(url: str, model: str, work: Work, num_rounds: int, num_clients: int) -> dict[str, list[dict[str, Any]]]:
    """Asks whole and streamed in turns, after a round of each that does not count."""
    rounds: dict[str, list[dict[str, Any]]] = {"whole": [], "streamed": []}
    with ProcessPoolExecutor(num_clients, mp_context=get_context("spawn")) as clients:
        for number in range(2 * (num_rounds + 1)):
            requests, name = round_of(work, 100 + number), ("whole", "streamed")[number % 2]
            begin_at = time.perf_counter() + SPREAD_S
            asked = [
                clients.submit(ask_all, url, model, requests[first::num_clients], name == "streamed", begin_at)
                for first in range(num_clients)
            ]
            found = [one for each in asked for one in each.result()]
            rounds[name].append(measured(found, requests))
            report(name if number > 1 else f"{name}, not counted", rounds[name][-1])
    return {name: each[1:] for name, each in rounds.items()}


def serving(shape: str, environment: dict[str, str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts the server and waits until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--random-weights", shape, "--port", str(port)]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
    began_at = time.perf_counter()
    while b"Serving " not in log.read_bytes():
        if server.poll() is not None or time.perf_counter() - began_at > LONGEST_START_S:
            server.kill()
            sys.exit(f"The server did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    report("server up", f"{time.perf_counter() - began_at:.1f} s")
    return server, f"http://127.0.0.1:{port}"


def report(name: str, value: object) -> None:
    if isinstance(value, dict):
        units = {"s": "{:.3f} s", "tok_s": "{:,.0f} tok/s"}
        units |= dict.fromkeys(("of_alone", "gap_of_alone"), "{:.3f}")
        value = ", ".join(
            f"{key} {one * 1e3:.1f} ms" if key[-4:] in ("_p50", "_p99") else f"{key} {units.get(key, '{}').format(one)}"
            for key, one in value.items()
        )
    print(f"{name}: {value}", flush=True)


def best(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(rounds, key=lambda each: each["s"])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--write-model", type=Path, help="write config.json and tokenizer.json here, and end")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4, help="processes that ask")
    parser.add_argument("--queue", type=int, nargs=3, default=Work().queue, metavar=("REQUESTS", "READ", "WRITTEN"))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine, alone and served"
    )
    parser.add_argument("--log", type=Path, default=Path("server.log"))
    parser.add_argument("--alone", action="store_true", help="run the engine alone, and nothing else")
    parser.add_argument("--not-alone", action="store_true", help="leave the engine alone out")
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    config = SHAPES[given.shape]
    if given.write_model is not None:
        from penstock.bench.random_model import save_shape

        given.write_model.mkdir(parents=True, exist_ok=True)
        save_shape(config, str(given.write_model), config["vocab_size"])
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
        (given.write_model / "tokenizer_config.json").write_text(json.dumps(words))
        return
    work = replace(Work.of_vocabulary(config["vocab_size"]), queue=tuple(given.queue))
    if given.alone:
        print("ALONE", json.dumps(alone(given.shape, work, given.rounds)))
        return
    settings = {"context": CONTEXT, "max_running": MAX_RUNNING, "block_size": 64, "prefix_cache": "false"}
    settings |= {"chunk_size": 8192, "dtype": "bfloat16"} | dict(pair.split("=", 1) for pair in given.set)
    environment = os.environ | {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    found: dict[str, Any] = {"shape": given.shape, "settings": settings}
    if given.url is None and not given.not_alone:
        command = [sys.executable, __file__, *sys.argv[1:], "--alone"]
        printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        found["alone"] = json.loads(printed.split("ALONE ", 1)[1])
        for each in found["alone"]:
            report("alone", each)
    server, url = (None, given.url) if given.url else serving(given.shape, environment, given.log)
    try:
        found |= through(url, given.model or given.shape, work, given.rounds, given.clients)
    finally:
        if server is not None:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    for name in "whole", "streamed":
        row = best(found[name])
        if "alone" in found:
            own = best(found["alone"])
            row["of_alone"] = row["tok_s"] / own["tok_s"]
            if "gap_p99" in row:
                row["gap_of_alone"] = row["gap_p99"] / own["gap_p99"]
        report(f"best {name}", row)
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
