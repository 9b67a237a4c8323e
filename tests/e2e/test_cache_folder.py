"""The cache folder from the command line: what another process read, sessions, and the folder itself."""

import json
import re

import pytest
from penstock_command import penstock
from tiny_chat_model import save_tiny_chat_model

WORDS = "The gate was opened and the turbine turned. " * 150
QUICK = ("--max-tokens", "4", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_chat_model(folder)
    return folder


@pytest.fixture
def kept(tmp_path):
    return ("--cache-dir", str(tmp_path / "cache"))


def asked(model, *arguments):
    done = penstock("run", model, "-p", WORDS, "--json", *QUICK, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_run_reads_what_the_first_one_kept_and_says_so(model, kept):
    alone, first, second = asked(model), asked(model, *kept), asked(model, *kept)
    assert "disk" not in alone
    assert alone["token_ids"] == first["token_ids"] == second["token_ids"]
    assert (first["cached_tokens"], second["cached_tokens"] % 256) == (0, 0)
    assert second["disk"]["loaded_tokens"] == second["cached_tokens"] >= 256
    assert second["disk"]["loaded_bytes"] > 0
    told = penstock("run", model, "-p", WORDS, *QUICK, *kept).stderr.decode()
    assert re.search(r"\([\d,]+ of them cached, [\d,]+ from disk", told)


def test_a_plan_and_the_doctor_tell_of_the_folder(model, kept):
    plan = ("plan", model, "--prompt-tokens", "1000", "--json")
    with_folder = json.loads(penstock(*plan, *kept).stdout)["disk_bytes"]
    assert with_folder > 0
    assert "disk_bytes" not in json.loads(penstock(*plan).stdout)
    asked(model, *kept)
    examined = penstock("doctor", model, *kept).stdout.decode()
    assert re.search(r"cache folder.*1 models", examined)
    refused = penstock("run", model, "-p", "a", "--cache-disk", "1GiB")
    assert (refused.returncode, b"Give --cache-dir" in refused.stderr) == (2, True)


def test_the_folder_is_listed_proven_and_cleared(model, kept, tmp_path):
    nothing = penstock("cache", "list", *kept)
    assert (nothing.returncode, b"There is no cache folder" in nothing.stderr) == (2, True)
    asked(model, *kept)
    listed = json.loads(penstock("cache", "list", "--json", *kept).stdout)
    assert [found["model"] for found in listed["models"]] == [str(model)]
    assert listed["models"][0]["about"]["dtype"] == "float32"
    assert str(model).encode()[-20:] in penstock("cache", "list", *kept).stdout.replace(b"\n", b"")
    assert penstock("cache", "verify", *kept).returncode == 0
    slab = next((tmp_path / "cache").rglob("*.kv"))
    slab.write_bytes(slab.read_bytes()[:-1] + b"?")
    found = penstock("cache", "verify", "--json", *kept)
    assert (found.returncode, json.loads(found.stdout)["damaged"]) == (1, [str(slab)])
    assert not slab.exists()
    unknown = penstock("cache", "clear", "another", "--yes", *kept)
    assert (unknown.returncode, b"Nothing is kept of" in unknown.stderr) == (2, True)
    assert b"free again" in penstock("cache", "clear", str(model), "--yes", *kept).stderr
    assert json.loads(penstock("cache", "list", "--json", *kept).stdout)["models"] == []


def talk(model, kept, session, *lines, extra=()):
    text = "".join(f"{line}\n" for line in (*lines, ""))
    return penstock("chat", model, *QUICK, *kept, "--session", session, *extra, stdin=text.encode())


def test_a_session_goes_on_in_another_process_and_reads_only_what_is_new(model, kept, tmp_path):
    first = talk(model, kept, "water", WORDS)
    assert first.returncode == 0, first.stderr
    second = talk(model, kept, "water", "And then?")
    assert b"The session water has 2 messages" in second.stderr
    told = re.search(r"read ([\d,]+) tokens \(([\d,]+) of them cached", second.stderr.decode())
    num_read, num_cached = (int(number.replace(",", "")) for number in told.groups())
    assert num_read - num_cached < 320, "a slab of a tiny model has 256 tokens"
    saved = json.loads((tmp_path / "cache" / "sessions" / "water.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert (tmp_path / "cache" / "sessions" / "water.json").stat().st_mode & 0o777 == 0o600
    assert b"its name has letters" in talk(model, kept, "../water", "a").stderr
    assert b"another system message" in talk(model, kept, "water", "a", extra=("--system", "Be brief.")).stderr
    (tmp_path / "cache" / "sessions" / "water.json").write_text("{}")
    broken = talk(model, kept, "water", "a")
    assert (broken.returncode, b"is no conversation" in broken.stderr) == (2, True)


def test_a_chat_saves_loads_and_asks_again(model, tmp_path):
    saved, shown = tmp_path / "talk.json", tmp_path / "none.png"
    lines = (
        "/retry",
        f"/image {shown}",
        "What turned?",
        "/retry",
        f"/save {saved}",
        "/load /nowhere",
        f"/load {saved}",
    )
    done = penstock("chat", model, *QUICK, stdin="".join(f"{line}\n" for line in (*lines, "/help", "")).encode())
    assert done.returncode == 0, done.stderr
    for said in (b"Nothing was answered yet", b"reads text only", b"2 messages are in", b"/nowhere cannot be read"):
        assert said in done.stderr.replace(b"\n", b" "), (said, done.stderr)
    assert b"The conversation has 2 messages now" in done.stderr
    assert done.stderr.count(b"; wrote ") == 2, "asked, and asked again"
    assert len(json.loads(saved.read_text())["messages"]) == 2
