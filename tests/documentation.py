"""What the documentation shows, run as a reader would: the Python blocks and `penstock` lines of a page, in order.

    python documentation.py PAGES.json FAILURES.json MODEL

MODEL takes the place of the default model, in Python and in commands that load one and name none. Each page is a
process of its own, in a folder with the files that the pages speak of. All of them are forked from one that has torch
already, because starting it for every line would take minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
EXAMPLES = Path(__file__).parents[1] / "examples"
TYPED = {"chat": b"Who wrote this?\n\n"}  # an empty line ends a chat
SHORT_ANSWERS = ("--max-tokens", "2")
TINY_MODEL = "./my-model"
Block = tuple[int, str, str]  # (line of its first line, language, code)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in FENCE.finditer(text)]


def penstock_call(line: str) -> tuple[str, tuple[str, ...]] | None:
    """(what is piped into it, its arguments) of a shell line that ends in a penstock command."""
    before, _, last = line.rpartition(" | ")
    words = shlex.split(last, comments=True)
    if not words or words[0].rpartition("/")[2] != "penstock":
        return None
    return before, tuple(words[1:])


def run_page(page: str, shown: list[Block], folder: Path, model: str, failures: dict[str, str]) -> None:
    os.chdir(folder)
    namespace = {"__name__": "__main__"}
    try:
        for first_line, language, code in shown:
            if language == "python":
                named = code.replace('"smollm2"', f'"{model}"')
                exec(compile("\n" * (first_line - 1) + named, page, "exec"), namespace)
            elif language == "sh":
                for line in code.splitlines():
                    run_line(line, model)
    except BaseException:
        failures[page] = traceback.format_exc()


def run_line(line: str, model: str) -> None:
    call = penstock_call(line)
    if call is not None:
        before, arguments = call
        # The guide for servers is run against one. Measurements take minutes; they have tests of their own.
        if arguments[0] not in ("serve", "bench") and "--url" not in arguments:
            typed = piped(before) if before else TYPED.get(arguments[0], b"")
            run_penstock(with_model(arguments, model), typed)
    elif line.startswith("export "):
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value


def with_model(arguments: tuple[str, ...], model: str) -> tuple[str, ...]:
    """Commands that load a model, with that one where they leave it to the default."""
    names_none = not arguments[1:] or (arguments[1].startswith("-") and "--help" not in arguments)
    loads = arguments[0] in ("run", "chat", "doctor")
    return (arguments[0], model, *arguments[1:]) if loads and names_none else arguments


def piped(command: str) -> bytes:
    return subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout


def run_penstock(arguments: tuple[str, ...], typed: bytes) -> None:
    from penstock.cli.main import main

    ends_early = arguments[0] in ("run", "chat") and "--help" not in arguments
    sys.argv = ["penstock", *arguments, *(SHORT_ANSWERS if ends_early else ())]
    if ends_early and "--memory" in arguments:  # what this process holds besides would count
        alone = [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]]
        done = subprocess.run(alone, input=typed, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return
    sys.stdin = io.TextIOWrapper(io.BytesIO(typed))
    printed = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert code == 0, f"{shlex.join(sys.argv)} ended with {code}:\n{printed.getvalue()}"
    if "--json" in arguments:
        json.loads(printed.getvalue()[printed.getvalue().index("{") :])


def lay_out(folder: Path) -> None:
    """The files and models that the pages speak of."""
    from PIL import Image
    from tiny_chat_model import save_tiny_chat_model
    from tiny_seq2seq import save_tiny_seq2seq
    from tiny_vision_models import save_tiny_vision_model

    from penstock.config import DEFAULT_MODEL
    from penstock.models.files import resolve

    (folder / "examples").mkdir()
    for path in (*EXAMPLES.glob("*.txt"), *EXAMPLES.glob("*.jsonl")):
        shutil.copy(path, folder / "examples")
    for name in ("plan.png", "photo.jpg"):
        Image.new("RGB", (40, 30), "red").save(folder / name)
    for model in ("my-model", "my-vision-model", "path/to/model"):
        (folder / model).mkdir(parents=True)
    save_tiny_chat_model(folder / "my-model")
    save_tiny_vision_model("llava", folder / "my-vision-model")
    save_tiny_seq2seq("t5", folder / "path/to/model")
    (folder / "my-model.gguf").symlink_to(resolve(DEFAULT_MODEL).gguf.path)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    author = ["-c", "user.name=A. Miller", "-c", "user.email=miller@example.org"]
    commit = ["commit", "--quiet", "--allow-empty", "--message", "Open the gate"]
    subprocess.run(["git", *author, "-C", folder, *commit], check=True)
    hub = folder / "hub" / "models--owner--name"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder / "my-model", hub / "snapshots" / ("0" * 40))


def needs_transformers(shown: list[Block]) -> bool:
    return any(re.search("transformers|--image|path/to/model", code) for _, _, code in shown)


def keep_apart(cache: Path) -> None:
    """What the pages keep, sessions above all, begins anew; only the compiled kernels are those of the user."""
    from penstock.config import cache_folder

    kernels = cache_folder("kernels")
    kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
    (cache / "penstock").mkdir(parents=True)
    (cache / "penstock" / "kernels").symlink_to(kernels)
    os.environ["XDG_CACHE_HOME"] = str(cache)


def main() -> None:
    source, target = (Path(name).absolute() for name in sys.argv[1:3])
    model = sys.argv[3]
    pages = json.loads(source.read_text())
    fork = multiprocessing.get_context("fork")
    things = Path("things").absolute()
    things.mkdir()
    laying = fork.Process(target=lay_out, args=(things,))  # transformers stays out of the pages that do not need it
    laying.start()
    import torch  # noqa: F401 - for the pages

    import penstock.cli.reading  # noqa: F401

    laying.join()
    assert laying.exitcode == 0
    os.environ |= {"HF_HUB_CACHE": str(things / "hub"), "HF_HUB_OFFLINE": "1"}
    keep_apart(Path("cache").absolute())
    with fork.Manager() as manager:
        failures = manager.dict()
        # Once a page has needed transformers, all that follow have it: those that need it come last.
        for number, (page, shown) in enumerate(sorted(pages.items(), key=lambda item: needs_transformers(item[1]))):
            if needs_transformers(shown):
                import transformers.generation.utils
                import transformers.modeling_utils  # noqa: F401 - for the pages
            folder = Path(f"page-{number}").absolute()
            shutil.copytree(things, folder, symlinks=True)
            if "images" in page:
                shutil.copytree(folder / "my-vision-model", folder / "my-model", dirs_exist_ok=True)
            reader = fork.Process(target=run_page, args=(page, shown, folder, model, failures))
            reader.start()
            reader.join()
            if reader.exitcode != 0:
                failures[page] = f"the process ended with {reader.exitcode}"
        found = dict(failures)
    target.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
