"""Figures of `penstock batch`: beside a server, killed on the way, and its memory over many lines.

python scripts/batch_figures.py lines in.jsonl                  500 questions about 25 documents, shuffled
python scripts/batch_figures.py server in.jsonl --most-s 170    the same through /v1/completions with 64 clients
python scripts/batch_figures.py kills MODEL in.jsonl            ten times kill -9; every line exactly once
python scripts/batch_figures.py memory MODEL --num-lines 100000 one token each; resident memory
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

WORDS = ["river", "stone", "light", "paper", "garden", "window", "silver", "morning", "engine", "market"]
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
NUM_KILLS = 10


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def write_lines(path: Path, num_lines: int, num_documents: int, words: tuple[int, int], max_tokens: int) -> None:
    rng = random.Random(1)
    documents = [text(rng, rng.randint(*words)) for _ in range(num_documents)]
    lines = [
        {"custom_id": f"line-{n}", "prompt": f"{documents[n % num_documents]}\nQuestion {n}: {text(rng, 8)}?"}
        for n in range(num_lines)
    ]
    rng.shuffle(lines)
    body = {"max_tokens": max_tokens, "temperature": 0}
    path.write_text("".join(json.dumps(line | body) + "\n" for line in lines))


def through_server(path: Path, settings: list[str], most_s: float, num_clients: int = 64) -> None:
    """Asks the lines one by one from many clients, in the order of the file, for so long at most."""
    process = subprocess.Popen(
        [*PENSTOCK, "serve", "smollm2", "--port", "18434", *settings], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "Serving" not in process.stderr.readline():
        assert process.poll() is None
    with httpx.Client(base_url="http://127.0.0.1:18434", timeout=3600) as client:
        began = time.perf_counter()

        def ask(line: str) -> Counter[str]:
            if time.perf_counter() - began > most_s:
                return Counter()
            body = {name: value for name, value in json.loads(line).items() if name != "custom_id"}
            try:
                answer = client.post("/v1/completions", json=body | {"model": "smollm2"})
            except httpx.HTTPError:  # the time is over, and the server with it
                return Counter()
            usage = answer.raise_for_status().json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return Counter(lines=1, read=usage["prompt_tokens"], cached=cached, wrote=usage["completion_tokens"])

        over = threading.Timer(most_s, process.kill)
        over.start()
        with ThreadPoolExecutor(num_clients) as pool:
            found = sum(pool.map(ask, path.read_text().splitlines()), Counter())
        seconds = min(most_s, time.perf_counter() - began)
        over.cancel()
    process.kill()
    process.wait()
    print(dict(found), f"{seconds:.1f} s, {(found['read'] + found['wrote']) / seconds:.1f} tok/s read and written")


def num_lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kills(model: str, path: Path) -> None:
    answers = Path(tempfile.mkdtemp()) / "answers.jsonl"
    asked = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
    command = [*PENSTOCK, "batch", str(path), str(answers), model]
    for number in range(NUM_KILLS):
        target = (number + 1) * len(asked) // (NUM_KILLS + 1)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and num_lines_of(answers) < target:
            time.sleep(0.01)
        process.kill()
        process.wait()
        print(f"killed at {num_lines_of(answers)} answers", flush=True)
    code = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode
    found = Counter(json.loads(line)["custom_id"] for line in answers.read_text().splitlines())
    exactly_once = found == Counter(asked)
    print(f"exit {code}; {len(found)} of {len(asked)} lines answered, each exactly once: {exactly_once}")


def memory(model: str, num_lines: int) -> None:
    folder = Path(tempfile.mkdtemp())
    source, answers = folder / "in.jsonl", folder / "answers.jsonl"
    with source.open("w") as file:
        for n in range(num_lines):
            file.write(json.dumps({"custom_id": str(n), "prompt": f"{n % 97} fox", "max_tokens": 1}) + "\n")
    command = [*PENSTOCK, "batch", str(source), str(answers), model]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    status, began = Path(f"/proc/{process.pid}/status"), time.perf_counter()
    seen: list[tuple[int, int]] = []  # bytes of answers, resident KiB
    while process.poll() is None:
        resident = [int(line.split()[1]) for line in status.read_text().splitlines() if "VmRSS" in line]
        if answers.exists() and resident:
            seen.append((answers.stat().st_size, resident[0]))
        time.sleep(0.1)
    seconds, total = time.perf_counter() - began, answers.stat().st_size
    first, last = next(one for size, one in seen if size >= total / 100), seen[-1][1]
    print(
        f"{num_lines_of(answers):,} answers in {seconds:.0f} s; resident memory {first / 1024:.1f} MiB at 1 %, ", end=""
    )
    print(f"{last / 1024:.1f} MiB at the end: {last / first - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lines", "server", "kills", "memory"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--num-lines", type=int, default=500)
    parser.add_argument("--documents", type=int, default=25)
    parser.add_argument("--words", type=int, nargs=2, default=(1_000, 4_000))
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--most-s", type=float, default=3600)
    parser.add_argument("--memory", default="1GiB")
    given = parser.parse_args()
    if given.what == "lines":
        write_lines(Path(given.names[0]), given.num_lines, given.documents, tuple(given.words), given.max_tokens)
    elif given.what == "server":
        through_server(Path(given.names[0]), ["--memory", given.memory, "--context", "8192"], given.most_s)
    elif given.what == "kills":
        kills(given.names[0], Path(given.names[1]))
    else:
        memory(given.names[0], given.num_lines)


if __name__ == "__main__":
    main()
