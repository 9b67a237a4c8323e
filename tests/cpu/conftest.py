import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from image_answers import SETTINGS
from tiny_models import save_tiny_model
from tiny_vision_models import TensorProcessor, plain_inputs, save_tiny_vision_model
from transformers import PreTrainedModel

from penstock.config import load_config
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.foreign.processor import MediaProcessor
from penstock.kernels import build
from penstock.plan.machine import cpu_flags


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run side by side, and threads that wait for each other take their processors away."""
    torch.set_num_threads(1)


@pytest.fixture(params=[one.id for one in build.INSTRUCTIONS if one.are_had(cpu_flags())])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The C kernels for each kind of instructions that this processor has, one after another."""
    if not build.can_run(request.param):
        pytest.skip(build.found(request.param).reason)
    monkeypatch.setenv("PENSTOCK_CPU_KERNELS", request.param)
    build.use(request.param)
    yield request.param
    build.use("auto")


Tiny = Callable[[str], tuple[Path, PreTrainedModel]]  # the name of a tiny model -> (its folder, the transformers model)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _made_once(save_tiny_model, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Where a processor can be made without more libraries, the folder has it."""
    return _made_once(save_tiny_vision_model, tmp_path_factory)


def _made_once(save: Callable[[str, Path], PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    @functools.cache
    def make(name: str) -> tuple[Path, PreTrainedModel]:
        folder = tmp_path_factory.mktemp(name)
        return folder, save(name, folder)

    return make


@pytest.fixture(scope="module")
def own_verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Self-checks of the module's models are kept, and kept apart from others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def load_vision(tiny_vision, own_verdicts) -> Iterator[Callable[..., Engine]]:
    """As `load`. Where a processor needs more libraries, the tensors that it would make stand in for it."""
    engines: list[Engine] = []

    def make(name: str, *, num_blocks: int | None = None, **settings) -> Engine:
        folder, model = tiny_vision(name)
        config = load_config(SETTINGS | {"text_only": False} | settings)
        loaded = load_model(str(folder), config)
        if num_blocks is not None:
            loaded = dataclasses.replace(loaded, num_blocks=num_blocks)
        engine = Engine(loaded)
        if engine.model.lane.processor is None:
            engine.model.lane.processor = MediaProcessor(TensorProcessor(plain_inputs(name, model)))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def load(tiny) -> Iterator[Callable[..., Engine]]:
    """Loads a tiny model into an engine; closes it, which checks the block pool, at the end."""
    engines: list[Engine] = []

    def make(name: str = "llama", **settings) -> Engine:
        engines.append(Engine.load(str(tiny(name)[0]), **SETTINGS | settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
