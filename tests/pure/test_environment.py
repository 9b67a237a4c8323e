"""Where a trace says that it was recorded."""

import platform
import re

import penstock
from penstock.trace.environment import environment, installed, source_commit


def test_an_environment_names_what_ran_where():
    found = environment(device="cpu", num_threads=3)
    assert (found.penstock, found.python) == (penstock.__version__, platform.python_version())
    assert (found.device, found.num_threads) == ("cpu", 3)
    assert found.torch == installed("torch")
    assert found.system.startswith(platform.system())


def test_what_is_not_installed_has_no_version():
    assert installed("no-such-package") is None


def test_a_commit_is_one_or_there_is_no_clone():
    commit = source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", commit)
