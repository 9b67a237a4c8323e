"""The config of a GGUF is that of the model which it was made of; `tests/cpu/test_gguf_architectures.py` runs both."""

import dataclasses

import pytest
from gguf_headers import header, recorded

from penstock.errors import InvalidModelFile
from penstock.models.gguf_config import hf_config
from penstock.models.gguf_translation import hf_tensors


@pytest.mark.parametrize("case", recorded())
def test_a_header_gives_the_config_of_its_model(case):
    assert hf_config(header(case)) == recorded()[case]["config"]


@pytest.mark.parametrize("case", recorded())
def test_the_tensors_of_a_header_get_the_names_of_the_model(case):
    tensors = hf_tensors(header(case))
    assert any(name.endswith(("embed_tokens.weight", "embeddings.weight")) for name in tensors)
    assert not any(name.startswith(("blk.", "token_embd", "output")) for name in tensors)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("granitehybrid", "granitehybrid.ssm.inner_size", 65),
        ("nemotron_h_moe", "nemotron_h_moe.ssm.inner_size", 129),
        ("qwen3next", "qwen3next.ssm.inner_size", 97),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_their_key(case, key, value):
    said = header(case)
    assert key in said.metadata
    with pytest.raises(InvalidModelFile, match=key):
        hf_config(dataclasses.replace(said, metadata={**said.metadata, key: value}))
