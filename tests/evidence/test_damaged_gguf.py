"""Ten thousand damaged GGUF files of a mixture in two parts: read as far as its weights, or refused in words."""

from pathlib import Path

import gguf_models
import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Type
from hostile_inputs import read_broken
from tiny_models import save_tiny_model

from penstock.engine.planning import plan
from penstock.models.decoder import Decoder
from penstock.models.files import resolve
from penstock.models.quantization import quantization_of
from penstock.models.spec import decoder_spec
from penstock.models.weights import open_weights

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(3600)]
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 2, "head_dim": 64}
KINDS = {"attn_v": Type.Q6_K, "ffn_down": Type.MXFP4, "attn_k": Type.IQ2_XS}
NUMBER = {"header of the first part": 4000, "header of the second part": 3000, "first part": 1500, "second part": 1500}


@pytest.fixture
def parts(tmp_path, monkeypatch) -> list[Path]:
    made = tiny_models._config("Qwen3MoeConfig", **tiny_models._EXPERTS | WIDE)
    monkeypatch.setitem(tiny_models.CONFIGS, "mixture", lambda: made)
    save_tiny_model("mixture", tmp_path)
    gguf_models.write_gguf(
        tmp_path,
        "qwen3moe",
        tmp_path / "model.gguf",
        lambda name: next((kind for stem, kind in KINDS.items() if stem in name), Type.Q4_K),
        tensors_of_part=16,
    )
    return sorted(tmp_path.glob("model-*.gguf"))


def load(path: Path) -> None:
    plan(str(path), prompt_tokens=100, memory="2GiB", device="cpu", dtype="bfloat16")
    files = resolve(str(path))
    spec, quantization = decoder_spec(files.config), quantization_of(files, "keep")
    Decoder(spec, dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization).load(open_weights(files))


@pytest.mark.parametrize("name", NUMBER)
def test_damaged_files_are_read_or_refused(name, parts):
    """What is broken is the header, with the data behind it as it was, or any byte of the file."""
    assert len(parts) == 2
    path = parts["second" in name]
    content, tensors = path.read_bytes(), resolve(str(path)).gguf.tensors.values()
    start = min(tensor.offset for tensor in tensors if tensor.path == path) if "header" in name else len(content)

    def read(damaged: bytes) -> None:
        path.write_bytes(damaged + content[start:])
        load(parts[0])

    outcome = read_broken(name, read, [content[:start]], NUMBER[name])
    print(f"\n{outcome.row()}")
