"""Tiles of attention on GPUs that are not here: compiled for them, they must fit into what a multiprocessor shares."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.attention.cuda import tile_shapes
from penstock.attention.triton_kernels import attend_tiles

GROUP = 8
POINTERS = {
    **dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("partial_ptr", "partial_lse_ptr", "sinks_ptr"), "*fp32"),
    **dict.fromkeys(("tiles_ptr", "query_starts_ptr", "context_lens_ptr", "table_ptr"), "*i32"),
}
NUMBERS = {
    **dict.fromkeys(("table_stride", "token_stride", "slot_stride", "num_splits"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}


def shared_bytes(shape, head_size, capability):
    names = attend_tiles.arg_names
    types = POINTERS | NUMBERS
    constants = {
        "GROUP": GROUP,
        "SIZE": head_size,
        "PADDED_SIZE": head_size,
        "PAGE": 16,
        "ROWS": shape.num_rows,
        "KEYS": shape.num_keys,
        "WINDOW": 0,
        **dict.fromkeys(("HAS_SOFTCAP", "HAS_SINKS", "IS_SPLIT"), False),
        "OVERLAPS": 0,
    }
    aligned = {*POINTERS, "token_stride", "slot_stride"}
    source = ASTSource(
        attend_tiles,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned},
    )
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


@pytest.mark.parametrize(
    ("head_size", "capability", "limit"),
    [
        (256, 86, 101_376),  # of consumers' cards
        (512, 90, 232_448),
        (128, 75, 65_536),
    ],
)
def test_wide_tiles_fit_where_the_usual_ones_would_not(head_size, capability, limit, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    usual = tile_shapes(GROUP, head_size, torch.bfloat16)[1]
    fitting = tile_shapes(GROUP, head_size, torch.bfloat16, limit)[1]
    assert fitting != usual or head_size == 512
    assert shared_bytes(fitting, head_size, capability) <= limit


def test_a_large_card_has_the_usual_tiles():
    """As they were measured to be fastest."""
    shapes = [tile_shapes(4, head_size, torch.bfloat16)[1] for head_size in (64, 128, 256)]
    assert [(shape.num_rows, shape.num_keys) for shape in shapes] == [(128, 64)] * 3
