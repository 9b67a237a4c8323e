"""Steps through all layers in one call of C, for bfloat16 decoders of attention and gated MLPs."""

# R rows that a step may have, M hidden size, F intermediate size

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.attention.c_library import c_kernels
from penstock.attention.cpu import CpuAttention
from penstock.attention.cpu_compiled import LARGEST_GROUP, AttentionCall, CompiledAttention, Heads, StoreCall
from penstock.models.cpu_layers import GELU_TANH, GateCall, NormCall, ProductCall, product_workspace
from penstock.models.decoder import Attention, Decoder, Layer
from penstock.models.layers import GatedMlp, Linear, PackedLinear, RmsNorm
from penstock.models.packing import GROUP, Format

MOST_ROWS = 1088  # a chunk of 1,024 and tokens beside it


class _Kind(IntEnum):
    """`enum kind` of cpu_steps.c."""

    NORM = 0
    PRODUCT = 1
    PACKED_PRODUCT = 2
    STORE = 3
    ATTEND = 4
    GATE = 5


class _Call(ctypes.Structure):
    _fields_ = [("to", ctypes.c_void_p), ("kind", ctypes.c_int64)]


class _Step(ctypes.Structure):
    """`struct step` of cpu_steps.c."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("calls", "layout", "workspace")],
        *[(name, ctypes.c_int32) for name in ("num_calls", "num_rows")],
    ]


class CompiledSteps:
    """The calls are listed once, over memory that every step uses again; C fills in what a step changes."""

    def __init__(self, decoder: Decoder, attention: CpuAttention, compiled: CompiledAttention) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._attention = attention
        self._compiled = compiled
        heads, kv_rows = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self._hidden_RM = _rows(spec.hidden_size, decoder.residual_dtype)
        self._normed_RM = _rows(spec.hidden_size)
        # What attention and the MLP make of them is never needed at the same time: it lies in the same memory.
        in_attention = [spec.qkv_rows, heads, heads, *([heads, kv_rows] if spec.qk_norm else [])]
        in_mlp = [2 * spec.intermediate_size, spec.intermediate_size]
        shared = _rows(max(sum(in_attention), sum(in_mlp)))
        self._qkv, self._rotated, self._attended, *self._normed_heads = _parts(shared, in_attention)
        self._gate_up, self._gated_RF = _parts(shared, in_mlp)
        self._most_inputs = max(spec.hidden_size, heads, spec.intermediate_size)
        self._group_sums = torch.empty(MOST_ROWS * self._most_inputs // GROUP)
        self._rotations = {
            name: tuple(_rows(rotary.spec.num_dims // 2) for _ in range(2)) for name, rotary in decoder.rotaries.items()
        }
        self._calls: list[tuple[_Kind, ctypes.Structure]] = []
        for layer in decoder.layers:
            assert isinstance(layer.mixer, Attention)
            assert isinstance(layer.mlp, GatedMlp)
            self._list_attention(layer, layer.mixer)
            self._list_mlp(layer.norms["post_attention_layernorm"], layer.mlp)
        self._table = (_Call * len(self._calls))(
            *[_Call(to=ctypes.addressof(call), kind=kind) for kind, call in self._calls]
        )

    def fits(self, inputs: ForwardInputs) -> bool:
        return 0 < len(inputs.ids_T) <= MOST_ROWS and c_kernels() is not None

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states of the step's tokens; the next call writes over them."""
        kernels = c_kernels()
        assert kernels is not None, "asked for a step that does not fit"
        num_rows = len(inputs.ids_T)
        hidden_TM = self._hidden_RM[:num_rows].copy_(self._decoder.embedded(inputs.ids_T))
        for name, rotation in self._decoder.rotations(inputs).items():
            cosines, sines = self._rotations[name]
            cosines[:num_rows].copy_(rotation.cos_T1R[:, 0])
            sines[:num_rows].copy_(rotation.sin_T1R[:, 0])
        self._attention.begin_step(inputs)
        layout = self._compiled.layout(self._decoder.spec.num_heads)
        step = _Step(
            calls=ctypes.addressof(self._table),
            layout=ctypes.addressof(layout),
            workspace=product_workspace(kernels, num_rows, self._most_inputs, layout.num_threads).data_ptr(),
            num_calls=len(self._table),
            num_rows=num_rows,
        )
        kernels.library.penstock_run_step(ctypes.byref(step))
        return hidden_TM

    def _list_attention(self, layer: Layer, mixer: Attention) -> None:
        spec = self._decoder.spec
        self._list_norm(layer.norms["input_layernorm"], self._hidden_RM, self._normed_RM)
        self._list_product(mixer.qkv, self._normed_RM, self._qkv)
        q, k, v = self._qkv.split([spec.q_rows, *[spec.num_kv_heads * spec.head_size] * 2], dim=-1)
        if spec.qk_norm is not None:
            normed_queries, normed_keys = self._normed_heads
            q = self._list_norm(layer.norms["self_attn.q_norm"], q, normed_queries)
            k = self._list_norm(layer.norms["self_attn.k_norm"], k, normed_keys)
        queries, keys, values = (
            Heads.of(x.unflatten(-1, (heads, -1)))
            for x, heads in ((q, spec.num_heads), (k, spec.num_kv_heads), (v, spec.num_kv_heads))
        )
        key_pages, value_pages = self._compiled.pages(mixer.index)
        store = StoreCall(
            queries=queries,
            keys=keys,
            values=values,
            rotated=self._rotated.data_ptr(),
            key_pages=key_pages,
            value_pages=value_pages,
            block_size=self._attention.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
        )
        if layer.spec.rotary:
            cosines, sines = self._rotations[layer.spec.rotary]
            store.cosines, store.sines, store.half = cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1]
        self._calls.append((_Kind.STORE, store))
        attend = AttentionCall(
            queries=self._rotated.data_ptr(),
            out=self._attended.data_ptr(),
            keys=key_pages,
            values=value_pages,
            sinks=None if mixer.sinks_H is None else mixer.sinks_H.data_ptr(),
            num_heads=spec.num_heads,
            window=mixer.rule.window or 0,
            scale=mixer.rule.scale,
            softcap=mixer.rule.softcap or 0.0,
        )
        self._calls.append((_Kind.ATTEND, attend))
        self._list_product(mixer.output, self._attended, self._hidden_RM, adds=True)

    def _list_mlp(self, norm: RmsNorm, mlp: GatedMlp) -> None:
        self._list_norm(norm, self._hidden_RM, self._normed_RM)
        self._list_product(mlp.gate_up, self._normed_RM, self._gate_up)
        gate = GateCall(
            gate_up=self._gate_up.data_ptr(),
            output=self._gated_RF.data_ptr(),
            width=self._gated_RF.shape[1],
            is_gelu=mlp.activation == GELU_TANH,
        )
        self._calls.append((_Kind.GATE, gate))
        self._list_product(mlp.down, self._gated_RF, self._hidden_RM, adds=True)

    def _list_norm(self, norm: RmsNorm, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Over parts of a row as wide as the weight: all of it, or each head."""
        width = norm.weight.numel()
        call = NormCall(
            input=x.data_ptr(),
            outer_stride=x.stride(0),
            inner_stride=width,
            output=out.data_ptr(),
            weight=norm.weight.data_ptr(),
            num_inner=x.shape[1] // width,
            width=width,
            is_wide=x.dtype == torch.float32,
            eps=norm.eps,
        )
        self._calls.append((_Kind.NORM, call))
        return out

    def _list_product(
        self, linear: Linear | PackedLinear, x: torch.Tensor, out: torch.Tensor, *, adds: bool = False
    ) -> None:
        is_packed = isinstance(linear, PackedLinear)
        call = ProductCall(
            rows=x.data_ptr(),
            weight=linear.matrix.bytes.data_ptr() if is_packed else linear.weight_OI.data_ptr(),
            bias=None if linear.bias_O is None else linear.bias_O.data_ptr(),
            **{"wide" if out.dtype == torch.float32 else "out": out.data_ptr()},
            group_sums=self._group_sums.data_ptr(),
            num_inputs=x.shape[1],
            num_outputs=out.shape[1],
            adds=adds,
            is_int4=is_packed and linear.matrix.format is Format.INT4,
        )
        self._calls.append((_Kind.PACKED_PRODUCT if is_packed else _Kind.PRODUCT, call))


def _rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Resident as far as steps have used them."""
    return torch.empty(MOST_ROWS, width, dtype=dtype)


def _parts(rows: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """One after another, each in rows of its own width."""
    flat = rows.flatten()[: MOST_ROWS * sum(widths)]
    return [part.view(MOST_ROWS, -1) for part in flat.split([MOST_ROWS * width for width in widths])]


def compiled_steps(decoder: Decoder, attention: AttentionBackend) -> CompiledSteps | None:
    """None where a step has to be run layer by layer."""
    spec = decoder.spec
    if not isinstance(attention, CpuAttention) or attention.compiled is None or decoder.dtype != torch.bfloat16:
        return None
    is_plain = spec.norms_inputs and not spec.norms_outputs and not spec.has_output_gate and spec.residual_scale == 1.0
    if not is_plain or spec.num_heads // spec.num_kv_heads > LARGEST_GROUP:
        return None
    if not all(_is_known(layer) for layer in decoder.layers):
        return None
    return CompiledSteps(decoder, attention, attention.compiled)


def _is_known(layer: Layer) -> bool:
    is_attention, mlp = isinstance(layer.mixer, Attention), layer.mlp
    return is_attention and isinstance(mlp, GatedMlp) and mlp.activation in ("silu", GELU_TANH)
