"""The server against its own description: schemathesis makes requests from /openapi.json, right ones and wrong ones.

schemathesis pins other packages, so it has an environment of its own; --schemathesis names its command.

.venv/bin/python scripts/server_fuzz.py --schemathesis FOLDER/bin/schemathesis
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from server_process import serving  # noqa: E402
from tiny_chat_model import save_tiny_chat_model  # noqa: E402

ENDLESS = "/timeline"  # follows the steps until its reader leaves
LONGEST_ANSWER = 32


def narrowed(description: dict[str, Any], model: str) -> dict[str, Any]:
    """The same, with the model that is served as the only one: else nearly every request would end at its name."""
    for schema in description["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if name == "model" and schema.get("additionalProperties") is False:
                schema["properties"][name] = {"const": model}
            if name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
                for option in field.get("anyOf", [field]):
                    if option.get("type") == "integer":
                        option["maximum"] = LONGEST_ANSWER
    return description


def slowest(log: list[str]) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in log if line.startswith("{"))
    requests = [line for line in lines if line["event"] == "request"]
    print(f"{len(requests)} requests")
    return sorted(requests, key=lambda request: -request["duration_ms"])[:5]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemathesis", default="schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="of each operation, in each phase that draws them")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, description = Path(folder) / "model", Path(folder) / "openapi.json"
        model.mkdir()
        save_tiny_chat_model(model)
        with serving(
            str(model), "--chunk-size", "32", "--dtype", "float32", "--context", "256", is_fresh=True
        ) as server:
            found = httpx.get(f"{server.url}/openapi.json").json()
            description.write_text(json.dumps(narrowed(found, str(model))))
            command = [asked.schemathesis, "run", str(description), "--url", server.url, "--exclude-path", ENDLESS]
            command += ["--checks", "not_a_server_error", "--request-timeout", "120", "--continue-on-failure"]
            command += ["--max-examples", str(asked.examples), "--seed", str(asked.seed), "--workers", "2"]
            command += ["--suppress-health-check", "all", "--warnings", "off", "--generation-database", "none"]
            code = subprocess.run(command, cwd=folder).returncode
            answer = httpx.get(f"{server.url}/health", timeout=30)
            assert server.metric_becomes("num_requests_running", 0)
            for request in slowest(server.log):
                print(
                    f"slow: {request['method']} {request['path']}, {request['status']}, {request['duration_ms']:.0f} ms"
                )
            print(f"health afterwards: {answer.status_code}; exit code {server.terminate()}")
    return code


if __name__ == "__main__":
    sys.exit(main())
