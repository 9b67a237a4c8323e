from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import PreTrainedModel

from penstock.engine.engine import Engine


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run side by side, and threads that wait for each other take their processors away."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """Name of a tiny model -> (its folder, the transformers model), made once."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, save_tiny_model(name, folder))
        return made[name]

    return make


@pytest.fixture
def load(tiny) -> Iterator[Callable[..., Engine]]:
    """Loads a tiny model into an engine; closes it, which checks the block pool, at the end."""
    engines: list[Engine] = []

    def make(name: str = "llama", **settings) -> Engine:
        engines.append(
            Engine.load(str(tiny(name)[0]), **{"dtype": "float32", "memory": "4GiB", "threads": 1} | settings)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
