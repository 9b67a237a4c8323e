"""The headers that `tests/pure/test_gguf_config.py` reads are those of files that are written as converters do."""

import dataclasses
import json
import os

import pytest
import tiny_models
from gguf_headers import HEADERS, recorded
from gguf_models import CASES, write_gguf
from tiny_models import save_tiny_model

from penstock.models.files import resolve
from penstock.models.gguf_config import hf_config


@pytest.mark.evidence
def test_recorded_headers_are_those_of_files(tmp_path, monkeypatch):
    """`PENSTOCK_WRITE_GOLDEN=1` records them anew."""
    found = {}
    for case in recorded():
        architecture, made = CASES[case]
        monkeypatch.setitem(tiny_models.CONFIGS, case, made)
        folder = tmp_path / case
        save_tiny_model(case, folder)
        files = resolve(str(write_gguf(folder, architecture, folder / "model.gguf")))
        said = files.gguf.metadata
        metadata = {key: said[key] for key in said if isinstance(said[key], (bool, int, float, str, list))}
        metadata = {key: value for key, value in metadata.items() if len(str(value)) < 400}
        tensors = {name: list(tensor.shape) for name, tensor in files.gguf.tensors.items()}
        found[case] = {"metadata": metadata, "tensors": tensors, "config": hf_config(files.gguf)}
    text = json.dumps(found, indent=1, default=dataclasses.asdict)
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        HEADERS.write_text(text)
    assert text == HEADERS.read_text()
