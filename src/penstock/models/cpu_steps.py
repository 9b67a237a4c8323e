"""Steps through layers in one call of C, for bfloat16 decoders of attention, gated MLPs and experts in few bits."""

# R rows that a step may have, M hidden size, F intermediate size

from __future__ import annotations

from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.attention.cpu import CpuAttention
from penstock.attention.cpu_compiled import LARGEST_GROUP, CompiledAttention, heads
from penstock.kernels.build import ffi
from penstock.kernels.calls import CKernels, address, c_kernels
from penstock.models.cpu_experts import is_known, mixture_bytes, mixture_fields, routing_fields
from penstock.models.cpu_layers import GELU_TANH, gate_fields, norm_fields, product_fields, workspace
from penstock.models.decoder import Attention, Decoder, Layer, Passage
from penstock.models.experts import Experts
from penstock.models.layers import GatedMlp, LayerNorm, Linear, RmsNorm
from penstock.models.quantization import HALF_GROUP
from penstock.models.streamed_experts import StreamedExperts

MAX_ROWS = 1088  # a chunk of 1,024 and tokens beside it


class CompiledSteps:
    """The calls are listed once, over memory that every step uses again; C fills in what a step changes."""

    def __init__(
        self, kernels: CKernels, decoder: Decoder, attention: CpuAttention, compiled: CompiledAttention
    ) -> None:
        spec = decoder.spec
        self._kernels = kernels
        self._decoder = decoder
        self._attention = attention
        self._compiled = compiled
        q_rows, kv_rows = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self._hidden_RM = _rows(spec.hidden_size, decoder.residual_dtype)
        self._normed_RM = _rows(spec.hidden_size)
        # What attention and the MLP make of them is never needed at the same time: it lies in the same memory.
        in_attention = [spec.qkv_rows, q_rows, q_rows, *([q_rows, kv_rows] if spec.qk_norm else [])]
        in_mlp = [2 * spec.intermediate_size, spec.intermediate_size]
        shared = _rows(max(sum(in_attention), sum(in_mlp)))
        self._qkv, self._rotated, self._attended, *self._normed_heads = _parts(shared, in_attention)
        self._gate_up, self._gated_RF = _parts(shared, in_mlp)
        self._most_inputs = max(spec.hidden_size, q_rows, spec.intermediate_size)
        self._group_sums = torch.empty(MAX_ROWS * self._most_inputs // HALF_GROUP)
        self._rotations = {
            name: tuple(_rows(rotary.spec.num_dims // 2) for _ in range(2)) for name, rotary in decoder.rotaries.items()
        }
        self._mixture: dict[str, Any] | None = None  # a call of one; all need as much memory
        if spec.experts is not None:
            self._scores_RE = _rows(spec.experts.num_experts, torch.float32)
            self._chosen_RA = _rows(spec.experts.num_active, torch.int32)
            self._weights_RA = _rows(spec.experts.num_active, torch.float32)
        self._calls: list[tuple[int, Any]] = []  # (kind, struct), kept alive: the table holds their addresses
        self._ends: list[int] = []  # of the calls of each layer
        self._choices: dict[int, StreamedExperts] = {}  # to be read, by the number of calls until rows have chosen
        self._last_stored = 0  # calls until the last layer's keys and values are in the pages
        for layer in decoder.layers:
            assert isinstance(layer.mixer, Attention)
            self._list_attention(layer, layer.mixer)
            if isinstance(layer.mlp, Experts):
                self._list_experts(layer, layer.mlp)
            else:
                assert isinstance(layer.mlp, GatedMlp)
                self._list_mlp(layer, layer.mlp)
            self._ends.append(len(self._calls))
        calls = [{"kind": kind, "with": int(ffi().cast("uintptr_t", call))} for kind, call in self._calls]
        self._table = ffi().new("struct call[]", calls)

    def fits(self, inputs: ForwardInputs) -> bool:
        return 0 < len(inputs.ids_T) <= MAX_ROWS and inputs.media is None and c_kernels() is not None

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states of the step's tokens; the next call writes over them."""
        passage = self._decoder.begin(inputs, self._hidden_RM[: len(inputs.ids_T)])
        self._attention.begin_step(inputs)
        self.advance(range(len(self._ends)), passage)
        return passage.hidden_TM

    def advance(self, layers: range, passage: Passage) -> None:
        """Takes tokens, whose step attention has begun, through some layers."""
        num_rows = len(passage.hidden_TM)
        hidden_TM = self._hidden_RM[:num_rows]
        is_elsewhere = passage.hidden_TM.data_ptr() != hidden_TM.data_ptr()
        if is_elsewhere:
            hidden_TM.copy_(passage.hidden_TM)
        for name, rotation in passage.rotations.items():
            cosines, sines = self._rotations[name]
            cosines[:num_rows].copy_(rotation.cos_T1R[:, 0])
            sines[:num_rows].copy_(rotation.sin_T1R[:, 0])
        layout = self._compiled.layout(self._decoder.spec.num_heads)
        num_bytes = self._kernels.library.penstock_product_bytes(num_rows, self._most_inputs, layout.num_threads)
        if self._mixture is not None:
            mixture = self._mixture | {"num_tokens": num_rows}
            num_bytes = max(num_bytes, mixture_bytes(self._kernels, mixture, layout.num_threads))
        first, last = self._ends[layers.start - 1] if layers.start else 0, self._ends[layers.stop - 1]

        def run(first: int, last: int, num_rows: int) -> None:
            for end in [*(at for at in self._choices if first < at < last), last]:
                fields = {"calls": self._table + first, "workspace": workspace(num_bytes).data_ptr()}
                fields["layout"] = self._compiled.layout(self._decoder.spec.num_heads)  # of the step that is begun
                step = ffi().new("struct step *", fields | {"num_calls": end - first, "num_rows": num_rows})
                self._kernels.library.penstock_run_step(step)
                if end in self._choices:
                    self._choices[end].take(self._chosen_RA[:num_rows])
                first = end

        asked = passage.inputs.of_asked_rows() if layers.stop == len(self._ends) else None
        if asked is None:
            run(first, last, num_rows)
            if is_elsewhere:
                passage.hidden_TM.copy_(hidden_TM)
            return
        run(first, self._last_stored, num_rows)
        rows_L = passage.inputs.logit_rows
        if len(rows_L):
            for rows in hidden_TM, self._rotated:
                rows[: len(rows_L)] = rows[rows_L]
            self._attention.begin_step(asked)
            run(self._last_stored, last, len(rows_L))
            passage.hidden_TM[rows_L] = hidden_TM[: len(rows_L)].clone()

    def _list_attention(self, layer: Layer, mixer: Attention) -> None:
        spec = self._decoder.spec
        self._list_norm(layer.norms["input_layernorm"], self._hidden_RM, self._normed_RM)
        self._list_product(mixer.qkv, self._normed_RM, self._qkv)
        q, k, v = self._qkv.split(spec.attention_rows(layer.spec), dim=-1)
        if spec.qk_norm is not None:
            normed_queries, normed_keys = self._normed_heads
            q = self._list_norm(layer.norms["self_attn.q_norm"], q, normed_queries)
            k = self._list_norm(layer.norms["self_attn.k_norm"], k, normed_keys)
        keys, values = self._compiled.pages(mixer.index)
        store = {
            "queries": heads(q.unflatten(-1, (spec.num_heads, -1))),
            "keys": heads(k.unflatten(-1, (spec.num_kv_heads, -1))),
            "values": heads(v.unflatten(-1, (spec.num_kv_heads, -1))),
            "rotated": self._rotated.data_ptr(),
            "key_pages": keys,
            "value_pages": values,
            "block_size": self._attention.block_size,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
        }
        if layer.spec.rotary:
            cosines, sines = self._rotations[layer.spec.rotary]
            store |= {"cosines": cosines.data_ptr(), "sines": sines.data_ptr(), "half": cosines.shape[-1]}
        self._list("store", store)
        self._last_stored = len(self._calls)
        attend = {
            "queries": self._rotated.data_ptr(),
            "out": self._attended.data_ptr(),
            "keys": keys,
            "values": values,
            "sinks": address(mixer.sinks_H),
            "num_heads": spec.num_heads,
            "window": mixer.rule.window or 0,
            "scale": mixer.rule.scale,
            "softcap": mixer.rule.softcap or 0.0,
        }
        self._list("attention", attend)
        self._list_added(layer, "attention", mixer.output, self._attended)

    def _list_mlp(self, layer: Layer, mlp: GatedMlp) -> None:
        self._list_norm(layer.norms[self._decoder.mlp_input_norm], self._hidden_RM, self._normed_RM)
        self._list_product(mlp.first, self._normed_RM, self._gate_up)
        self._list("gate", gate_fields(self._gate_up, self._gated_RF, mlp.activation))
        self._list_added(layer, "mlp", mlp.down, self._gated_RF)

    def _list_experts(self, layer: Layer, experts: Experts) -> None:
        self._list_norm(layer.norms[self._decoder.mlp_input_norm], self._hidden_RM, self._normed_RM)
        chosen = {"experts": self._chosen_RA.data_ptr(), "weights": self._weights_RA.data_ptr()}
        read = {"rows": self._normed_RM.data_ptr()} | chosen
        self._list("routing", routing_fields(experts) | read | {"logits": self._scores_RE.data_ptr()})
        if experts.streamed is not None:
            self._choices[len(self._calls)] = experts.streamed
        mixture = mixture_fields(self._kernels, experts, self._decoder.spec.hidden_size)
        self._mixture = mixture | read | {"out": self._hidden_RM.data_ptr()}
        self._list("mixture", self._mixture)

    def _list_added(self, layer: Layer, part: str, linear: Linear, x: torch.Tensor) -> None:
        """Adds to the hidden states, within the product where no norm comes between."""
        name = self._decoder.output_norm(part)
        if name is None:
            self._list_product(linear, x, self._hidden_RM, adds=True)
        else:  # the rows that were normed before are not needed any more
            self._list_product(linear, x, self._normed_RM)
            self._list_norm(layer.norms[name], self._normed_RM, self._normed_RM, sums=self._hidden_RM)

    def _list_norm(
        self, norm: RmsNorm | LayerNorm, x: torch.Tensor, out: torch.Tensor, sums: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalises parts of a row as wide as the weight: all of it, or each head. Adds them to `sums` as well."""
        assert isinstance(norm, RmsNorm)
        parts = x.unflatten(-1, (-1, norm.weight.numel()))
        self._list("norm", norm_fields(parts, norm.weight, out, norm.eps, sums))
        return out

    def _list_product(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> None:
        for fields in product_fields(x, linear.weight_OI, linear.bias_O, out, adds=adds):
            self._list("product", fields | {"group_sums": self._group_sums.data_ptr()})

    def _list(self, kind: str, fields: dict[str, Any]) -> None:
        self._calls.append((getattr(self._kernels.library, kind.upper()), ffi().new(f"struct {kind} *", fields)))


def _rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Holds rows, resident as far as steps have used them."""
    return torch.empty(MAX_ROWS, width, dtype=dtype)


def _parts(rows: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """One after another, each in rows of its own width."""
    flat = rows.flatten()[: MAX_ROWS * sum(widths)]
    return [part.view(MAX_ROWS, -1) for part in flat.split([MAX_ROWS * width for width in widths])]


def compiled_steps(decoder: Decoder, attention: AttentionBackend) -> CompiledSteps | None:
    """None where a step has to be run layer by layer."""
    spec = decoder.spec
    if not isinstance(attention, CpuAttention) or attention.compiled is None or decoder.dtype != torch.bfloat16:
        return None
    is_plain = spec.norms_inputs and not spec.has_output_gate and spec.residual_scale == 1.0
    is_plain = is_plain and spec.norm == "rms" and spec.qk_norm != "rotated head" and spec.query_scale is None
    is_plain = is_plain and not (spec.latent or spec.norms_values or spec.scales_layers or spec.layer_inputs)
    are_alike = len({(layer.num_kv_heads, layer.head_size) for layer in spec.layers}) == 1
    if not is_plain or not are_alike or spec.is_parallel or spec.num_heads // spec.num_kv_heads > LARGEST_GROUP:
        return None
    if not all(_is_known(layer) for layer in decoder.layers) or (spec.norms_outputs and spec.experts):
        return None
    kernels = c_kernels()
    return None if kernels is None else CompiledSteps(kernels, decoder, attention, attention.compiled)


def _is_known(layer: Layer) -> bool:
    is_attention, mlp = isinstance(layer.mixer, Attention) and layer.beside is None, layer.mlp
    if isinstance(mlp, Experts):
        is_plain = mlp.spec.sigmoid is None and mlp.shared is None and mlp.routed_norm is None
        return is_attention and is_plain and is_known(mlp)
    return is_attention and isinstance(mlp, GatedMlp) and mlp.activation in ("silu", GELU_TANH)
