"""A server under attack: what a steady stream beside it feels, how soon /health answers, and what memory comes back.

.venv/bin/python scripts/server_attacks.py --seconds 300 --connections 100
.venv/bin/python scripts/server_attacks.py --seconds 15 --rounds 3 --gaps --attacks grammars many-values
.venv/bin/python scripts/server_attacks.py --seconds 15 --rounds 3 --gaps --latency-target-ms 50 --attacks long-prompts

Each attack runs in a process of its own, for so many seconds, through so many connections at once. With several rounds,
each after a calm of the same length, what is usual is measured on the same machine in the same minute. With `--gaps`,
for a machine that nothing else uses, the longest gap between tokens may be three times the usual longest. Attackers who
ask for what anybody may ask for, prompts and answers, get their share of the steps; a latency target says how long
those are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import re
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from server_process import ServerProcess, serving  # noqa: E402

HEALTH_PERIOD_S, SHORT_PERIOD_S, MAX_HEALTH_S = 0.25, 2.0, 1.0
MAX_CALM_S, RECOVERY_S = 10.0, 10.0
MAX_GAP_RATIO, MAX_GROWTH = 3.0, 0.10
HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SHORT = {"messages": [{"role": "user", "content": "Tell a long story."}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    host: str
    port: int
    model: str

    async def connect(self) -> tuple[NotingReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = NotingReader(limit=2**16, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, self.host, self.port)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def head(self, path: str, num_bytes: int) -> bytes:
        return (HEAD.format(path=path) + f"Content-Length: {num_bytes}\r\n\r\n").encode()

    def post(self, path: str, body: object) -> bytes:
        content = body if isinstance(body, bytes) else json.dumps({"model": self.model} | dict(body)).encode()
        return self.head(path, len(content)) + content


class NotingReader(asyncio.StreamReader):
    """Keeps how an answer begins."""

    beginning = b""

    def feed_data(self, data: bytes) -> None:
        self.beginning = (self.beginning + data[:16])[:16]
        super().feed_data(data)


Way = Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


async def _drip(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, byte: bytes, period_s: float) -> None:
    """Sends a byte every so often until the server has enough of it."""
    ended = asyncio.ensure_future(_until_closed(reader))
    while not ended.done():
        writer.write(byte)
        await writer.drain()
        await asyncio.wait({ended}, timeout=period_s)


async def silent(target, reader, writer, number) -> None:
    await _until_closed(reader)


async def half_headers(target, reader, writer, number) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    await _until_closed(reader)


async def dripping_headers(target, reader, writer, number) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-a: ")
    await _drip(writer, reader, b"a", 1.0)


async def half_bodies(target, reader, writer, number) -> None:
    writer.write(target.head("/v1/chat/completions", 1_000_000) + b'{"messages": ')
    await _until_closed(reader)


async def dripping_bodies(target, reader, writer, number) -> None:
    writer.write(target.head("/v1/chat/completions", 1_000_000) + b"{")
    await _drip(writer, reader, b" ", 1.0)


async def unread_answers(target, reader, writer, number) -> None:
    """Asks for the page again and again, and reads nothing."""
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
    await asyncio.sleep(90)


async def unread_streams(target, reader, writer, number) -> None:
    """Asks for a stream of tokens, and reads nothing."""
    writer.transport.pause_reading()
    writer.write(target.post("/v1/chat/completions", SHORT | {"stream": True, "max_tokens": 400}))
    await asyncio.sleep(90)


async def slow_readers(target, reader, writer, number) -> None:
    """Reads a stream of tokens, a few bytes a second."""
    writer.write(target.post("/v1/chat/completions", SHORT | {"stream": True, "max_tokens": 400}))
    while await reader.read(16):
        await asyncio.sleep(1)


async def half_closed(target, reader, writer, number) -> None:
    """Asks for a stream and closes its own half at once."""
    writer.write(target.post("/v1/chat/completions", SHORT | {"stream": True, "max_tokens": 50}))
    writer.write_eof()
    await _until_closed(reader)


async def resets(target, reader, writer, number) -> None:
    """Asks for a stream and resets the connection after its first bytes."""
    writer.write(target.post("/v1/chat/completions", SHORT | {"stream": True, "max_tokens": 50}))
    await reader.read(1)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def grammars(target, reader, writer, number) -> None:
    """Schemas with very many states, each with another letter, so that none is known."""
    letter = "".join(chr(97 + (number // 26**place) % 26) for place in range(3))
    schema = {"type": "string", "pattern": f"^({letter}{{1000}}){{1000}}$"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    writer.write(target.post("/v1/chat/completions", SHORT | {"response_format": form, "max_tokens": 20}))
    await reader.read(1)


async def fair_grammars(target, reader, writer, number) -> None:
    """Schemas that are large, and taken."""
    names = {f"field{number}_{index}": {"type": "string", "maxLength": 40} for index in range(300)}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    writer.write(target.post("/v1/chat/completions", SHORT | {"response_format": form, "max_tokens": 20}))
    await reader.read(1)


def _large(content: Callable[[Target], bytes], path: str) -> Way:
    async def send(target, reader, writer, number) -> None:
        writer.write(target.post(path, content(target)))
        await writer.drain()
        await reader.read(1)

    return send


def _filled(model: str, before: str, part: str, after: str, num_bytes: int = 31 << 20) -> bytes:
    return (f'{{"model": "{model}", {before}' + ",".join([part] * (num_bytes // (len(part) + 1))) + after).encode()


MESSAGE = '{"role": "user", "content": "a"}'
LARGE = {
    "many-values": ("/v1/chat/completions", '"messages": [', "[]", "]}"),
    "many-messages": ("/v1/chat/completions", '"messages": [', MESSAGE, "]}"),
    "many-tokens": ("/v1/completions", '"prompt": [', "7", "]}"),
    "many-keys": (
        "/v1/chat/completions",
        '"messages": [{"role": "user", "content": "a"}], "metadata": {',
        '"a":"b"',
        "}}",
    ),
    "long-texts": ("/tokenize", '"prompt": "', "and a word", '"}'),
    "deep-values": ("/v1/chat/completions", '"messages": ' + "[" * 900, "[" * 900 + "]" * 900, "]" * 900 + "}"),
}


def _large_way(name: str) -> Way:
    path, before, part, after = LARGE[name]
    return _large(lambda target: _filled(target.model, before, part, after), path)


async def long_prompts(target, reader, writer, number) -> None:
    """Prompts that fill the context, each another, and clients that leave while they are read."""
    body = {"prompt": [3 + (number * 7919 + index) % 40_000 for index in range(4000)], "max_tokens": 1}
    writer.write(target.post("/v1/completions", body))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1), 2.0)


SLOW: dict[str, Way] = {
    "silent": silent,
    "half-headers": half_headers,
    "dripping-headers": dripping_headers,
    "half-bodies": half_bodies,
    "dripping-bodies": dripping_bodies,
    "unread-answers": unread_answers,
    "unread-streams": unread_streams,
    "slow-readers": slow_readers,
    "half-closed": half_closed,
    "resets": resets,
}
# Of these a few connections at once are enough.
COSTLY: dict[str, tuple[Way, int]] = {
    "grammars": (grammars, 12),
    "fair-grammars": (fair_grammars, 12),
    "long-prompts": (long_prompts, 12),
    **{name: (_large_way(name), 4) for name in LARGE},
}


def attack(names: list[str], target: Target, num_connections: int, counts: Sequence[int]) -> None:
    """Runs attacks side by side until the process is ended; counts connections: made, not made, answered with 503."""
    asyncio.run(_attack(names, target, num_connections, counts))


async def _attack(names: list[str], target: Target, num_connections: int, counts: Sequence[int]) -> None:
    numbers = itertools.count(int(time.time() * 1000) % 10**6)

    async def keep_at_it(way: Way) -> None:
        while True:
            try:
                reader, writer = await target.connect()
            except OSError:
                counts[1] += 1
                await asyncio.sleep(0.2)
                continue
            counts[0] += 1
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await way(target, reader, writer, next(numbers))
            finally:
                counts[2] += reader.beginning.startswith(b"HTTP/1.1 503")
                writer.transport.abort()
            await asyncio.sleep(0.2)

    ways = [(SLOW[name], num_connections) if name in SLOW else COSTLY[name] for name in names]
    await asyncio.gather(*(keep_at_it(way) for way, number in ways for _ in range(number)))


@dataclass(slots=True, kw_only=True)
class Watch:
    """What one well-behaved client, a monitor and the system see of a server, in a thread for each."""

    server: ServerProcess
    model: str
    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    most_mb: float = 0.0
    failures: list[str] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._ends.clear()
        for run in (self._stream, self._ask_health, self._ask_shortly, self._look):
            self._threads.append(threading.Thread(target=self._kept, args=(run,)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        while self._threads:
            self._threads.pop().join()

    def _kept(self, run: Callable[[], None]) -> None:
        while not self._ends.is_set():
            try:
                run()
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{run.__name__}: {error!r}"[:200])
                self._ends.wait(0.5)

    def _stream(self) -> None:
        """One stream after the other; the time to a first token is no gap."""
        body = {"model": self.model, "prompt": "The penstock", "max_tokens": 200, "stream": True, "ignore_eos": True}
        url, last = f"{self.server.url}/v1/completions", None
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200, response.status_code
            for line in response.iter_lines():
                if self._ends.is_set():
                    return
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps_s.append(now - last)
                    last = now

    def _ask_health(self) -> None:
        began_at = time.perf_counter()
        connection = http.client.HTTPConnection(self.server.url.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            status = connection.getresponse().status
        self.health_s.append(time.perf_counter() - began_at)
        assert status == 200, status
        self._ends.wait(HEALTH_PERIOD_S)

    def _ask_shortly(self) -> None:
        """What another user waits for the first token of a short prompt."""
        body, began_at = {"model": self.model, "prompt": "The penstock", "max_tokens": 1}, time.perf_counter()
        assert httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=60).status_code == 200
        self.first_s.append(time.perf_counter() - began_at)
        self._ends.wait(SHORT_PERIOD_S)

    def _look(self) -> None:
        self.most_mb = max(self.most_mb, resident_mb(self.server))
        self._ends.wait(0.1)


def resident_mb(server: ServerProcess) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found
    return int(found[1]) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    usual: Watch
    under: Watch
    before_mb: float
    after_mb: float
    is_well: bool  # answers a request afterwards, and nothing runs or waits
    counts: list[int]  # of the attackers' connections: made, not made, answered with 503

    @property
    def gap_ratio(self) -> float:
        return max(self.under.gaps_s, default=0.0) / max(self.usual.gaps_s, default=1.0)

    @property
    def growth(self) -> float:
        return self.after_mb / self.before_mb - 1

    def __str__(self) -> str:
        gaps, usual, first = self.under.gaps_s or [0.0], self.usual.gaps_s or [0.0], self.under.first_s or [0.0]
        cells = [
            self.name,
            f"{statistics.median(usual) * 1e3:.1f} / {_percentile(usual, 99) * 1e3:.0f} / {max(usual) * 1e3:.0f}",
            f"{statistics.median(gaps) * 1e3:.1f} / {_percentile(gaps, 99) * 1e3:.0f} / {max(gaps) * 1e3:.0f}",
            f"{self.gap_ratio:.1f}",
            f"{statistics.median(self.under.health_s) * 1e3:.0f} / {max(self.under.health_s) * 1e3:.0f}",
            f"{statistics.median(first) * 1e3:.0f} / {max(first) * 1e3:.0f}",
            f"{self.before_mb:.0f} / {self.under.most_mb:.0f} / {self.after_mb:.0f} ({self.growth:+.0%})",
            " / ".join(map(str, self.counts)),
            "; ".join([*(() if self.is_well else ("not well afterwards",)), *self.under.failures[:2]]) or "-",
        ]
        return f"| {' | '.join(cells)} |"

    def holds(self, *, in_gaps: bool) -> bool:
        is_steady = not in_gaps or self.gap_ratio <= MAX_GAP_RATIO
        is_soon = max(self.under.health_s) <= MAX_HEALTH_S
        return self.is_well and is_steady and is_soon and self.growth <= MAX_GROWTH and not self.under.failures


COLUMNS = ["attack", "usual gap, ms: median / p99 / longest", "under attack", "longest over usual"]
COLUMNS += ["/health, ms: median / longest", "first token of another, ms", "MB before / most / after"]
COLUMNS += ["connections made / not / 503", "failures"]


def _percentile(values: list[float], share: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * share // 100)]


def first_of_each_kind(server: ServerProcess, model: str) -> None:
    """Asks what a server keeps something of, for good: a long prompt, a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    for path, body in (
        ("completions", {"prompt": [*range(3, 2003)], "max_tokens": 1}),
        ("chat/completions", SHORT | {"response_format": form, "max_tokens": 5}),
    ):
        found = httpx.post(f"{server.url}/v1/{path}", json={"model": model} | body, timeout=60)
        assert found.status_code == 200, found.text


def watched(name: str, attacks: list[str], server: ServerProcess, model: str, asked: argparse.Namespace) -> Row:
    """Rounds of a calm time and the attack, and what is left of it after another calm time."""
    host, port = server.url.removeprefix("http://").split(":")
    usual, under = Watch(server=server, model=model), Watch(server=server, model=model)
    processes = multiprocessing.get_context("spawn")
    counts = processes.Array("l", 3)
    before_mb = resident_mb(server)
    for _ in range(asked.rounds):
        with usual:
            time.sleep(min(MAX_CALM_S, asked.seconds / asked.rounds))
        attacker = processes.Process(
            target=attack,
            args=(attacks, Target(host=host, port=int(port), model=model), asked.connections, counts),
        )
        attacker.start()
        while not counts[0] + counts[1]:  # it has started and imported what it needs
            time.sleep(0.01)
        with under:
            time.sleep(asked.seconds / asked.rounds)
            attacker.kill()
        attacker.join()
        is_well = server.metric_becomes("num_requests_running", 0) and server.metric_becomes("num_requests_waiting", 0)
    time.sleep(RECOVERY_S)
    body = {"model": model, "prompt": "The penstock", "max_tokens": 2}
    is_well = is_well and httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    after_mb = resident_mb(server)
    return Row(
        name=name, usual=usual, under=under, before_mb=before_mb, after_mb=after_mb, is_well=is_well, counts=[*counts]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--gaps", action="store_true", help="holds gaps too: on a machine that nothing else uses")
    parser.add_argument("--latency-target-ms")
    parser.add_argument("--usual-limits", action="store_true", help="of connections: those that a server has unasked")
    parser.add_argument("--connections", type=int, default=100, help="of each way to be slow")
    parser.add_argument("--attacks", nargs="*", default=["slow"], choices=["slow", "each", *SLOW, *COSTLY])
    asked = parser.parse_args()
    chosen: list[tuple[str, list[str]]] = []
    for name in asked.attacks:
        if name == "each":
            chosen += [(one, [one]) for one in (*SLOW, *COSTLY)]
        else:
            chosen.append(("all ways to be slow", [*SLOW]) if name == "slow" else (name, [name]))
    os.environ["PENSTOCK_PREFIX_CACHE"] = "0"  # what it keeps on purpose would hide what is kept by mistake
    limits = [] if asked.usual_limits else ["--max-connections", "2048", "--max-connections-per-client", "2048"]
    limits += ["--latency-target-ms", asked.latency_target_ms] if asked.latency_target_ms else []
    with serving(asked.model, "--context", "4096", "--memory", "3GiB", *limits, is_fresh=True) as server:
        with Watch(server=server, model=asked.model):
            first_of_each_kind(server, asked.model)
            time.sleep(MAX_CALM_S)
        time.sleep(RECOVERY_S)
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
        rows = []
        for name, attacks in chosen:
            rows.append(watched(name, attacks, server, asked.model, asked))
            print(rows[-1], flush=True)
    return 0 if all(row.holds(in_gaps=asked.gaps) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
