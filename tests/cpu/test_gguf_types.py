"""Types of GGUF whose codes nothing multiplies: they are read as the gguf package reads them, and a plan says so."""

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf_models import write_gguf
from stored_blocks import SCALES
from tiny_models import CONFIGS, _config, prompt, save_tiny_model

import penstock
from penstock.engine.engine import Engine
from penstock.models.files import resolve
from penstock.models.quantization import FLOATS, LAYOUTS
from penstock.models.weights import open_weights


def is_read(kind):
    _items, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        return np.isfinite(quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)).all()
    except NotImplementedError:
        return False


def test_every_type_that_the_gguf_package_reads_is_kept_or_expanded():
    assert {kind for kind in Type if is_read(kind)} - FLOATS == LAYOUTS.keys() | SCALES.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "wide llama", lambda: _config("LlamaConfig", hidden_size=256, intermediate_size=256))
        made = tmp_path_factory.mktemp("wide")
        save_tiny_model("wide llama", made)
    return made


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_a_file_in_a_rare_type_is_expanded_to_the_values_of_the_gguf_package(kind, folder, tmp_path):
    def by_name(name):
        return Type.Q4_K if "attn_v" in name else kind

    path = write_gguf(folder, "llama", tmp_path / "rare.gguf", by_name)
    files = resolve(str(path))
    stored = files.gguf.tensors["blk.1.ffn_down.weight"]
    assert stored.quant_type == kind
    with path.open("rb") as file:
        file.seek(stored.offset)
        blocks = np.frombuffer(file.read(stored.num_bytes), np.uint8).reshape(stored.shape[0], -1)
    expected = quants.dequantize(blocks, kind)
    found = torch.empty(expected.shape)
    open_weights(files).copy_into(found, "model.layers.1.mlp.down_proj.weight")
    assert np.array_equal(found.numpy(), expected)
    assert 0 < np.abs(expected).max() < 8
    with Engine.load(str(path), memory="4GiB", threads=1, dtype="bfloat16") as engine:
        assert engine.generate(prompt(20), max_tokens=3, ignore_eos=True).finish_reason == "length"
    plan = penstock.plan(str(path), prompt_tokens=100, memory="4GiB", dtype="bfloat16")
    assert any(f"weights in {kind.name} are expanded" in one for one in plan.prompt.adjustments)
