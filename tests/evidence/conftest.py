"""Tables: each test prints its rows, and holds them to a bound. `pytest -s` shows them."""

from collections.abc import Iterator

import penstock.engine  # noqa: F401 - sets OpenMP's wait policy, so it stands before torch

# isort: split
import pytest
from transformers.utils import logging as library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "evidence" in item.path.parts:
            item.add_marker(pytest.mark.evidence)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every model is checked anew."""
    library.set_verbosity_error()
    library.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest) -> None:
    """What stands above the rows of a table."""
    print(f"\n{request.module.HEAD}")
