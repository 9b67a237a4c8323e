"""What a public load client measures against what the server says: first tokens, gaps, and every request answered.

guidellm pins other packages, so it has an environment of its own; --guidellm names its command.

.venv/bin/python scripts/server_guidellm.py --guidellm FOLDER/bin/guidellm
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from server_process import ServerProcess, serving  # noqa: E402
from tiny_chat_model import save_tiny_chat_model  # noqa: E402

from penstock.config import DEFAULT_MODEL  # noqa: E402

MAX_APART = 0.05
# Their name for it, ours, and the milliseconds of one of theirs.
MEASURES = (
    ("time_to_first_token_ms", "time_to_first_token_seconds"),
    ("inter_token_latency_ms", "inter_token_latency_seconds"),
)


def totals(server: ServerProcess) -> dict[str, tuple[float, float]]:
    return {ours: (server.metric(f"{ours}_sum"), server.metric(f"{ours}_count")) for _, ours in MEASURES}


def load(command: str, server: ServerProcess, tokenizer: Path, folder: Path, asked: argparse.Namespace) -> dict:
    """What guidellm reports of its one benchmark."""
    report = folder / "report.json"
    size = f"prompt_tokens={asked.prompt_tokens},output_tokens={asked.output_tokens}"
    subprocess.run(
        [
            *[command, "run", "--disable-console-interactive"],
            *["--backend", f"kind=openai_http,target={server.url},model={DEFAULT_MODEL}"],
            *["--profile", f"kind=concurrent,streams={asked.streams}"],
            *["--constraint", f"kind=max_requests,count={asked.requests}"],
            *["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"],
            *["--data", f"kind=synthetic_text,{size}", "--output", f"kind=json,path={report}"],
        ],
        check=True,
    )
    return json.loads(report.read_text())["benchmarks"][0]["metrics"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidellm", default="guidellm")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        save_tiny_chat_model(tokenizer)  # the tokenizer of the default model
        with serving(DEFAULT_MODEL, "--memory", "2GiB", is_fresh=True) as server:
            before = totals(server)
            found = load(asked.guidellm, server, tokenizer, folder, asked)
            after = totals(server)
    ended = {kind: int(found["request_totals"][kind]) for kind in ("successful", "errored", "incomplete")}
    print(f"requests: {ended}")
    is_kept = ended == {"successful": asked.requests, "errored": 0, "incomplete": 0}
    for theirs, ours in MEASURES:
        seconds, count = (b - a for a, b in zip(before[ours], after[ours], strict=True))
        client_ms, server_ms = found[theirs]["successful"]["mean"], seconds / count * 1e3
        apart = client_ms / server_ms - 1
        print(f"{theirs}: client {client_ms:.2f}, server {server_ms:.2f}, {apart:+.1%} (allowed {MAX_APART:.0%})")
        is_kept = is_kept and abs(apart) <= MAX_APART
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
