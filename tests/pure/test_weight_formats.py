"""Which format the matrices of the default model, a quantised GGUF, are kept in."""

import pytest

from penstock.engine.planning import plan
from penstock.errors import InvalidSetting
from penstock.kernels import build

KEPT = "keep" if build.can_run() else "none"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "bfloat16"}, KEPT),
        ({"dtype": "bfloat16", "quantize": "none"}, "none"),
        ({"dtype": "bfloat16", "cpu_kernels": "torch"}, "none"),
        ({"dtype": "float32"}, "none"),
        ({"dtype": "float32", "quantize": "keep"}, "keep"),
        ({"dtype": "bfloat16", "lane": "transformers-generic-text"}, "none"),
    ],
    ids=str,
)
def test_codes_are_kept_where_they_are_multiplied_as_they_lie(settings, expected):
    assert plan("smollm2", prompt_tokens=100, device="cpu", memory="4GiB", **settings).quantize == expected


def test_what_was_asked_for_is_refused_where_it_cannot_be_had():
    with pytest.raises(InvalidSetting, match="is for lane"):
        plan("smollm2", prompt_tokens=100, device="cpu", quantize="keep", lane="transformers-generic-text")


@pytest.mark.skipif(not build.can_run(), reason="no C kernels")
def test_kept_codes_need_room_for_sums_but_not_for_a_tile():
    settings = {"prompt_tokens": 100, "chunk_size": 100, "device": "cpu", "memory": "4GiB", "dtype": "bfloat16"}
    kept, plain = plan("smollm2", **settings).prompt, plan("smollm2", **settings, quantize="none").prompt
    by_tiles = plan("smollm2", **settings, quantize="keep", cpu_kernels="torch").prompt
    assert kept.weight_bytes == by_tiles.weight_bytes < plain.weight_bytes
    assert kept.activation_bytes < plain.activation_bytes < by_tiles.activation_bytes
