"""Tiles on GPUs that are not here: compiled for them, they must fit into what a multiprocessor shares."""

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
from penstock.kernels import triton_experts
from penstock.kernels.triton_attention import attend_tiles
from penstock.models import cuda_experts

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
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return compiled(attend_tiles, types, constants, capability, options).metadata.shared


def compiled(kernel, types, constants, capability, options):
    """For a card of that capability; pointers and strides are aligned."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types.get(name, "").startswith("*") or name in ("token_stride", "slot_stride")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(
    ("head_size", "capability", "limit"),
    [
        (256, 86, 101_376),  # of consumers' cards
        pytest.param(512, 90, 232_448, marks=pytest.mark.evidence),
        pytest.param(128, 75, 65_536, marks=pytest.mark.evidence),
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


EXPERT_POINTERS = {
    **dict.fromkeys(("in_ptr", "x_ptr", "inner_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("order_ptr", "tiles_ptr", "experts_ptr"), "*i32"),
    **dict.fromkeys(("weights_ptr", "shares_ptr"), "*fp32"),
}


@pytest.mark.parametrize(
    ("capability", "limit", "num_rows"),
    [
        *((86, 101_376, 64), (90, 232_448, 65_536)),
        pytest.param(75, 65_536, 65_536, marks=pytest.mark.evidence),
        *(pytest.param(86, 101_376, num_rows, marks=pytest.mark.evidence) for num_rows in (4096, 65_536)),
        *(pytest.param(90, 232_448, num_rows, marks=pytest.mark.evidence) for num_rows in (64, 2048, 4096, 8192)),
    ],
)
def test_tiles_of_experts_fit(num_rows, capability, limit, tmp_path, monkeypatch):
    """Of a mixture of 128 experts of 768, and with biases and in turns as in gpt-oss."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiles = cuda_experts.tile_shapes(num_rows, 128, torch.bfloat16, limit)
    sizes = {"NUM_ACTIVE": 8, "ROWS": tiles.num_rows, "OVERLAPS": 2 if capability == 90 else 0, "ALPHA": 1.7}
    gate_up = {"NUM_IN": 2048, "NUM_OUT": 768, "STEP": 2, "UP": 1, "KIND": 3, "LIMIT": 7.0} | sizes
    down = {"NUM_IN": 768, "NUM_OUT": 2048, "STEP": 1, "UP": 0, "KIND": 0, "LIMIT": 0.0} | sizes
    for constants, tile in ((gate_up, tiles.gate_up), (down, tiles.down)):
        constants |= {"OUTS": tile.num_outs, "COLUMNS": tile.num_columns}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        found = compiled(triton_experts.multiply_tiles, EXPERT_POINTERS, constants, capability, options)
        assert found.metadata.shared <= limit
        assert capability < 90 or "wgmma" in found.asm["ptx"] or tile.num_outs < 64


@pytest.mark.parametrize("num_active", [1, 6, 8])
def test_rows_of_experts_alone_compile(num_active, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gate_up, down = cuda_experts.alone_tiles(2048, 1408, num_active)
    constants = {"NUM_ACTIVE": num_active, "NUM_IN": 2048, "NUM_OUT": 1408, "STEP": 1, "UP": 1408, "OVERLAPS": 1}
    constants |= {"KIND": 0, "LIMIT": 0.0, "ALPHA": 1.0, "OUTS": gate_up.num_outs, "COLUMNS": gate_up.num_columns}
    found = compiled(triton_experts.gate_up_alone, EXPERT_POINTERS, constants, 90, {"num_warps": gate_up.num_warps})
    assert "ld.global.v4" in found.asm["ptx"]
    padded = triton.next_power_of_2(num_active)
    constants = {"NUM_ACTIVE": num_active, "PADDED_ACTIVE": padded, "NUM_IN": 1408, "NUM_OUT": 2048, "OVERLAPS": 1}
    constants |= {"ADDS": True, "OUTS": down.num_outs, "COLUMNS": down.num_columns}
    found = compiled(triton_experts.down_alone, EXPERT_POINTERS, constants, 90, {"num_warps": down.num_warps})
    assert "ld.global.v4" in found.asm["ptx"]
