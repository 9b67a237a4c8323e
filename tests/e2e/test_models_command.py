"""`penstock models` with the hub's own client, against a small server that speaks the hub's protocol on loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hostile_readers import small_gguf
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

COMMIT = "c0ffee" * 6 + "1234"
PICKLE = "pytorch_model.bin"
PARTS = ["model-bf16-00001-of-00002.gguf", "model-bf16-00002-of-00002.gguf"]
PADDING = 24 << 20  # the client writes ten megabytes at a time, and goes on after what it wrote


class Hub(ThreadingHTTPServer):
    """Serves the folders `owner/name` below one; a file whose name is in `cuts` breaks off in its middle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.cuts, self.asked = folder, set(), []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        if path.startswith("api/models/"):
            return self._api(path.removeprefix("api/models/").split("/"))
        owner, name, kind, _, *file = [*path.split("/"), "", "", "", ""]
        place = self.server.folder / owner / name / "/".join(file).strip("/")
        if kind == "resolve" and place.is_file():
            return self._file(place)
        return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _api(self, parts: list[str]) -> None:
        folder = self.server.folder / parts[0] / parts[1]
        if not folder.is_dir():
            self._send(404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        if "tree" in parts:
            sizes = [path.stat().st_size for path in files]
            oids = [hashlib.sha1(path.read_bytes()).hexdigest() for path in files]
            found = [
                {"type": "file", "path": name, "size": size, "oid": oid}
                for name, size, oid in zip(names, sizes, oids, strict=True)
            ]
        else:
            found = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, place: Path) -> None:
        content = place.read_bytes()
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        is_cut = self.command == "GET" and place.name in self.server.cuts
        self._send(
            206 if first else 200, content[first:], headers, most=len(content) // 2 if is_cut and not first else 0
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str], most: int = 0) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: most if most else None])
        if most:
            self.close_connection = True

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    save_tiny_model("llama", folder / "tiny" / "llama")
    weights = folder / "tiny" / "llama" / "model.safetensors"
    save_file(load_file(weights) | {"mtp.room": torch.zeros(PADDING, dtype=torch.uint8)}, weights)
    (folder / "tiny" / "llama" / PICKLE).write_bytes(b"not to be fetched")
    (folder / "tiny" / "llama" / "modeling_llama.py").write_text("raise SystemExit")
    (folder / "tiny" / "pickled").mkdir()
    (folder / "tiny" / "pickled" / PICKLE).write_bytes(b"")
    many = folder / "tiny" / "files"
    (many / "low").mkdir(parents=True)
    for name in ("model-Q8_0.gguf", "low/model-Q4_K_M.gguf", *PARTS):
        small_gguf(many / name)
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def models(hub, tmp_path):
    """The command in a process of its own: the hub's client reads its settings when it is imported."""

    def call(*arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "penstock.cli.main", "models", *arguments]
        values = os.environ | own | {"HF_HUB_DISABLE_XET": "1"} | environment
        return subprocess.run(
            command, input=typed, capture_output=True, text=True, env=values, timeout=300, check=False
        )

    return call


def test_a_model_is_fetched_listed_found_and_removed(models, hub, tmp_path):
    outside = tmp_path / "kept.txt"
    outside.write_text("here")
    hub.asked.clear()
    hub.cuts = {"model.safetensors"}
    done = models("download", "tiny/llama")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (
        hub.folder / "tiny" / "llama" / "model.safetensors"
    ).read_bytes()
    assert any(path.endswith("model.safetensors") and asked for _, path, asked in hub.asked)  # it went on
    fetched = {path.rpartition("/")[2] for command, path, _ in hub.asked if command == "GET"}
    assert not fetched & {PICKLE, "modeling_llama.py"}
    assert "%" in done.stderr  # progress
    hub.asked.clear()
    assert models("download", "tiny/llama").stdout == done.stdout
    assert not [path for command, path, _ in hub.asked if command == "GET" and "resolve" in path]  # all of it is here

    (listed,) = [
        one for one in json.loads(models("list", str(tmp_path), "--json").stdout)["models"] if one["name"] != "smollm2"
    ]
    assert (listed["name"], listed["lane"], listed["path"]) == ("tiny/llama", "optimized-native-text", str(folder))
    assert listed["weight_bytes"] == (folder / "model.safetensors").stat().st_size
    assert models("path", "tiny/llama", HF_HUB_OFFLINE="1").stdout.strip() == str(folder)

    assert models("remove", "tiny/llama", typed="n\n").returncode == 1
    assert folder.is_dir()
    assert models("remove", "tiny/llama", typed="y\n").returncode == 0
    assert not folder.exists()
    assert outside.read_text() == "here"


@pytest.mark.evidence
def test_one_gguf_is_fetched_by_a_part_of_its_name(models, tmp_path):
    done = models("download", "tiny/files", "--gguf", "q4_k_m")
    assert done.returncode == 0, done.stderr
    fetched = Path(done.stdout.strip())
    assert [path.name for path in fetched.parents[1].rglob("*.gguf")] == ["model-Q4_K_M.gguf"]
    (listed,) = [
        one for one in json.loads(models("list", str(tmp_path), "--json").stdout)["models"] if one["name"] != "smollm2"
    ]
    assert (listed["name"], listed["path"]) == ("tiny/files/low/model-Q4_K_M.gguf", str(fetched))
    assert listed["lane"] == "optimized-native-text"
    assert models("path", listed["name"], HF_HUB_OFFLINE="1").stdout.strip() == str(fetched)


@pytest.mark.evidence
def test_all_parts_of_a_gguf_are_fetched(models):
    done = models("download", "tiny/files", "--gguf", "bf16")
    assert done.returncode == 0, done.stderr
    fetched = Path(done.stdout.strip())
    assert (fetched.name, sorted(path.name for path in fetched.parent.glob("*.gguf"))) == (PARTS[0], PARTS)


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("download", "tiny/pickled"), "no safetensors; it has no GGUF either"),
        (("download", "tiny/files"), "choose one with --gguf: low/model-Q4_K_M.gguf"),
        (("download", "tiny/files", "--gguf", "Q"), "fits 2 files"),
        (("download", "tiny/nothing"), "the hub has no such model"),
        (("remove", "smollm2"), "pip uninstall"),
        (("remove", "../../tmp"), "is not in the hub's cache"),
    ],
)
def test_what_cannot_be_done_is_refused(models, arguments, said):
    done = models(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
