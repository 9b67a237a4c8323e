"""What a cache folder gives back to other processes, and what it survives.

`python scripts/disk_cache.py PART [MODEL] [--tokens N] [--number N] [--most BYTES]`. Each part compares all tokens with
a run without the folder and prints its figures. It exits with 1 where tokens differ, a request fails or the budget is
passed.

reuse: the first token of a prompt, cold and from disk. cost: what storing takes of reading. killed: a process that dies
at 80 % of a prompt. kills: processes that die anywhere. damage: files that changed. mixed: prompts in random order in
two processes. budget: the folder, watched while it is full.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import penstock
from penstock.prompt.random_tokens import random_tokens

MEMORY = "4GiB"


def worker(model: str, folder: str | None, settings: dict[str, Any]) -> None:
    """Answers lines of [seed, length, max_tokens] with a document each, until the input ends."""
    kept = {"cache_dir": folder} if folder else {}
    with penstock.Engine.load(model, memory=MEMORY, **kept, **settings) as engine:
        print(json.dumps({"adjustments": engine.adjustments}), flush=True)
        end = min(engine.model.spec.vocab_size, 40_000)
        for line in sys.stdin:
            seed, length, max_tokens = json.loads(line)
            request = engine.submit(random_tokens(length, seed, end=end), max_tokens=max_tokens, ignore_eos=True)
            began_at = time.perf_counter()
            for event in request.events():
                if isinstance(event, penstock.PrefillProgress):
                    print(json.dumps({"computed": event.num_computed}), flush=True)
                elif isinstance(event, penstock.Finished):
                    found = event.output
            told = {"tokens": found.token_ids, "disk": found.hits.disk, "ttft_s": found.ttft_s}
            print(json.dumps(told | {"total_s": time.perf_counter() - began_at}), flush=True)


class Process:
    """A process of its own with an engine."""

    def __init__(self, model: str, folder: Path | None, **settings: Any) -> None:
        command = [sys.executable, __file__, "worker", model, str(folder or ""), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.adjustments = self._read()["adjustments"]

    def ask(self, seed: int, length: int, max_tokens: int = 8, *, until: int | None = None) -> dict[str, Any]:
        """The answer, or what was told when so many tokens were computed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([seed, length, max_tokens]) + "\n")
        self._process.stdin.flush()
        while "tokens" not in (told := self._read()):
            if until is not None and told["computed"] >= until:
                break
        return told

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def rest(self, seconds: float) -> None:
        """Waits, with nothing to read before."""
        select.select([], [], [], seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0, "a process did not end well"


def once(model: str, folder: Path | None, seed: int, length: int, **settings: Any) -> dict[str, Any]:
    process = Process(model, folder, **settings)
    answer = process.ask(seed, length)
    process.close()
    return answer


def forget_pages(folder: Path) -> None:
    """Has the system read the files from the disk again."""
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def taken(folder: Path) -> int:
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in ("", *folders, *files):
            with suppress(FileNotFoundError):
                total += 0 if name in folders else Path(parent, name).lstat().st_blocks * 512
    return total


def reuse(model: str, folder: Path, length: int) -> bool:
    settings = {"context": length + 512}
    cold = once(model, None, 1, length, **settings)
    first = once(model, folder, 1, length, **settings)
    forget_pages(folder)
    from_disk, again = (once(model, folder, 1, length, **settings) for _ in range(2))
    for name, one in (("cold", cold), ("stored", first), ("from disk", from_disk), ("again", again)):
        print(f"{model}, {length} tokens, {name}: first token {one['ttft_s']:.3f} s, {one['disk']} from disk")
    ways = f"{cold['ttft_s'] / from_disk['ttft_s']:.1f} x from disk, {cold['ttft_s'] / again['ttft_s']:.1f} x again"
    print(f"{ways}; storing took {first['ttft_s'] / cold['ttft_s'] - 1:+.1%}")
    return cold["tokens"] == first["tokens"] == from_disk["tokens"] == again["tokens"]


def cost(model: str, folder: Path, length: int) -> bool:
    """Pairs of a prompt read without and with the folder, in two processes that live throughout."""
    without, beside = Process(model, None, context=length + 512), Process(model, folder, context=length + 512)
    ratios, is_equal = [], True
    for seed in range(1, 6):
        pair = [process.ask(seed, length) for process in (without, beside)]
        ratios.append(pair[1]["ttft_s"] / pair[0]["ttft_s"])
        is_equal &= pair[0]["tokens"] == pair[1]["tokens"]
    without.close()
    beside.close()
    print(f"{model}, {length} tokens, first token with the folder over without: {[round(one, 4) for one in ratios]}")
    print(f"median {sorted(ratios)[2]:.4f}")
    return is_equal


def killed(model: str, folder: Path, length: int) -> bool:
    settings = {"context": length + 512}
    cold = once(model, None, 1, length, **settings)
    process = Process(model, folder, **settings)
    process.ask(1, length, until=int(0.8 * length))
    process.rest(0.3)
    process.kill()
    after = once(model, folder, 1, length, **settings)
    shares = (
        f"{after['disk'] / length:.1%} of the prompt from disk, {after['total_s'] / cold['total_s']:.1%} of the time"
    )
    print(f"{model}, killed at 80 % of {length} tokens: {shares}")
    return after["tokens"] == cold["tokens"]


def kills(model: str, folder: Path, length: int, number: int = 50) -> bool:
    drawn, hits, is_equal = random.Random(5), 0, True
    expected = {seed: once(model, None, seed, length)["tokens"] for seed in range(3)}
    for _ in range(number):
        process = Process(model, folder)
        seed = drawn.randrange(3)
        answer = process.ask(seed, length, until=drawn.randrange(1, length))
        hits += answer.get("disk", 0) > 0
        is_equal &= answer.get("tokens", expected[seed]) == expected[seed]
        process.rest(drawn.random() * 0.05)
        process.kill()
    for seed, tokens in expected.items():
        is_equal &= once(model, folder, seed, length)["tokens"] == tokens
    print(f"{model}: {number} processes killed; tokens {'equal' if is_equal else 'DIFFER'} after them")
    return is_equal


def damage(model: str, folder: Path, length: int, number: int = 200) -> bool:
    drawn, is_equal, num_less = random.Random(6), True, 0

    def answer(**settings: Any) -> Any:
        with penstock.Engine.load(model, memory=MEMORY, **settings) as engine:
            end = min(engine.model.spec.vocab_size, 40_000)
            return engine.generate(random_tokens(length, 1, end=end), max_tokens=8, ignore_eos=True)

    expected = answer().token_ids
    answer(cache_dir=str(folder))
    whole = answer(cache_dir=str(folder)).hits.disk
    for _ in range(number):
        slabs = sorted(folder.rglob("*.kv"))
        path = drawn.choice(slabs)
        path.write_bytes(_damaged(path.read_bytes(), drawn.choice(slabs).read_bytes(), drawn))
        found = answer(cache_dir=str(folder))
        num_less += found.hits.disk < whole
        is_equal &= found.token_ids == expected
    told = f"{num_less} of the requests after them read less from disk"
    print(f"{model}: {number} damaged files, {told}; tokens {'equal' if is_equal else 'DIFFER'}")
    return is_equal


def _damaged(data: bytes, other: bytes, drawn: random.Random) -> bytes:
    """A bit changed, an end lost, a page of zeros, or another slab in its place."""
    place = drawn.randrange(len(data))
    kind = drawn.randrange(4)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << drawn.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    return data[:place] + bytes(4096) + data[place + 4096 :] if kind == 2 else other


def mixed(model: str, folder: Path, lengths: Sequence[int] = tuple(range(1024, 16_385, 512))) -> bool:
    """Every prompt twice, in random order, each time in the other of two processes."""
    drawn, is_equal, hits, seconds = random.Random(7), True, [], []
    context = max(lengths) + 512
    alone = Process(model, None, context=context)
    expected = {length: alone.ask(length, length)["tokens"] for length in lengths}
    alone.close()
    pair = [Process(model, folder, context=context) for _ in range(2)]
    asked = [(length, turn) for length in lengths for turn in range(2)]
    drawn.shuffle(asked)
    seen: set[int] = set()
    for length, _ in asked:
        answer = pair[length in seen].ask(length, length)
        is_equal &= answer["tokens"] == expected[length]
        if length in seen:
            hits.append(answer["disk"] > 0)
            seconds.append(answer["ttft_s"])
        seen.add(length)
        pair[0].rest(0.1)  # what was read is written behind the steps
    for process in pair:
        process.close()
    told = f"{len(asked)} prompts of {min(lengths)} to {max(lengths)} tokens in two processes"
    print(
        f"{model}: {told}: {sum(hits)} of {len(hits)} seen before were hits; tokens {'equal' if is_equal else 'DIFFER'}"
    )
    return is_equal and all(hits)


def budget(model: str, folder: Path, length: int, number: int = 50, most: int = 200_000_000) -> bool:
    process = Process(model, folder, cache_disk=most, context=length + 512)
    watcher = subprocess.Popen(
        [sys.executable, __file__, "watch", str(folder), "0"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    for seed in range(number):
        process.ask(seed, length, 1)
    process.close()
    largest = int(watcher.communicate()[0])
    print(f"{model}: {number} prompts of {length} tokens, at most {largest:,} bytes of {most:,} were taken")
    return largest <= most


def watch(folder: Path) -> None:
    """Prints the most that a folder took, looked at a hundred times a second until the input ends."""
    largest = 0
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        largest = max(largest, taken(folder))
    print(largest)


PARTS = {"reuse": reuse, "cost": cost, "killed": killed, "kills": kills, "damage": damage, "budget": budget}


def main() -> int:
    if sys.argv[1] == "worker":
        worker(sys.argv[2], sys.argv[3] or None, json.loads(sys.argv[4]))
        return 0
    if sys.argv[1] == "watch":
        watch(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "mixed"])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--number", type=int, help="Processes, files or prompts.")
    parser.add_argument("--most", type=int, help="Bytes of the folder, of `budget`.")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-kept-"))
    more = {name: value for name in ("number", "most") if (value := getattr(asked, name)) is not None}
    try:
        if asked.part == "mixed":
            is_held = mixed(asked.model, folder, range(1024, asked.tokens + 1, 512))
        else:
            is_held = PARTS[asked.part](asked.model, folder, asked.tokens, **more)
    finally:
        shutil.rmtree(folder)
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
