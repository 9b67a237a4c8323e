"""Times every kernel of recurrent layers on this GPU, and holds what they give to torch in float64.

    python benchmarks/h200/recurrence_kernels.py [--shape qwen3-next ...] [--tokens 1 --tokens 64 ...]

A line has the microseconds of each kernel, those of the whole layer without its products, GB/s of the states that are
read and written, and how far the outputs and the states are from float64, beside the same of torch in float32.
Tokens up to 256 are single ones of so many sequences; more are one prompt. Launches are recorded and replayed.
With --tiles, the kernels that take longest are also timed in other tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from replays import replayed_us

from penstock.attention.backend import ForwardInputs
from penstock.attention.chunk_tables import ChunkTables
from penstock.cache.storage import LayerState
from penstock.models import cuda_recurrence
from penstock.models.cuda_recurrence import ColumnTile
from penstock.models.delta import GatedDelta
from penstock.models.layer_specs import DeltaSpec, MambaSpec
from penstock.models.layers import Linear
from penstock.models.mamba import Mamba

NUM_REPLAYS, MAX_SINGLES, HIDDEN = 20, 256, 2048
TOKENS = (1, 8, 64, 256, 512, 2048, 8192)
SHAPES: dict[str, DeltaSpec | MambaSpec] = {
    "qwen3-next": DeltaSpec(
        num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, conv_width=4, is_grouped=True
    ),
    "granite-4.0-h": MambaSpec(
        num_heads=48, head_size=64, num_groups=1, state_size=128, conv_width=4, has_conv_bias=True, has_bias=False,
        time_step_limits=(0.0, float("inf")),
    ),
}  # fmt: skip
CUDA = torch.device("cuda")
# (columns, warps, stages) of each kernel that are worth trying
TILES = {
    "convolve": [(columns, warps, 2) for columns in (64, 128) for warps in (4, 8)],
    "convolve singles": [(128, 1, 2), (128, 4, 2), (256, 2, 2)],
    "singles": [(columns, warps, 2) for columns in (16, 32, 64, 128) for warps in (1, 2, 4, 8)],
    "pieces": [(64, 4, 2), (64, 8, 2)],
    "chunks": [(columns, warps, stages) for columns in (16, 32, 64) for warps in (4, 8) for stages in (1, 2, 3)],
}


def layer_of(spec: DeltaSpec | MambaSpec) -> GatedDelta | Mamba:
    place: Any = {"dtype": torch.bfloat16, "device": CUDA}

    def linear(num_out: int, num_in: int) -> Linear:
        made = Linear.empty(num_out, num_in, bias=False, **place)
        made.weight_OI.normal_(0, 1 / num_in**0.5)
        return made

    linears = {"recurrent_input": linear(spec.widest_rows, HIDDEN)}
    if isinstance(spec, DeltaSpec):
        linears |= {"recurrent_gates": linear(2 * spec.num_value_heads, HIDDEN)}
        linears |= {"recurrent_output": linear(HIDDEN, spec.value_width)}
        made = GatedDelta.empty(spec, 1e-6, linears, **place)
    else:
        linears |= {"recurrent_output": linear(HIDDEN, spec.inner_width)}
        made = Mamba.empty(spec, 1e-6, linears, **place)
    made.conv_CW.normal_(0, 0.5)
    made.a_log_H.uniform_(0, 2.7)
    made.dt_bias_H.uniform_(-5, -1)
    if made.norm is not None:
        made.norm.weight.fill_(1.0)
    if isinstance(made, Mamba):
        made.skip_H.fill_(1.0)
        if made.conv_bias_C is not None:
            made.conv_bias_C.normal_(0, 0.1)
    return made


def counts_of(num_tokens: int) -> tuple[int, ...]:
    return (1,) * num_tokens if num_tokens <= MAX_SINGLES else (num_tokens,)


def new_state(spec: DeltaSpec | MambaSpec, num_slots: int) -> LayerState:
    matrices = torch.randn(num_slots, *spec.matrix_shape, device=CUDA) * 0.1
    return LayerState(
        matrices_SHKV=matrices,
        tails_SWC=torch.randn(num_slots, *spec.tail_shape, device=CUDA, dtype=torch.bfloat16),
    )


def copied(state: LayerState) -> LayerState:
    return LayerState(matrices_SHKV=state.matrices_SHKV.clone(), tails_SWC=state.tails_SWC.clone())


def inputs_of(counts: tuple[int, ...], tables: ChunkTables | None = None) -> ForwardInputs:
    none, starts = torch.empty(0, device=CUDA), tuple(itertools.accumulate(counts, initial=0))
    return ForwardInputs(
        ids_T=none, positions_T=none, query_starts=starts, context_lens=starts[1:], block_table=(),
        rotary_variants=(), sequence_ids=(), logit_rows=none, state_slots=tuple(range(len(counts))),
        chunk_tables=tables,
    )  # fmt: skip


def microseconds(run: Callable[[], object]) -> float:
    return statistics.median_high(replayed_us(lambda _: run(), num_calls=4, num_replays=NUM_REPLAYS))


class Parts:
    """Launches kernel after kernel as a layer does, and remembers each launch, so that it can be repeated alone."""

    def __init__(self) -> None:
        self.kernels, self.launches = cuda_recurrence._kernels, []

    def __getattr__(self, name: str) -> Parts:
        self.name = name
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        kernel, label = getattr(self.kernels, self.name), self.name

        def launch(*arguments: object, **options: object) -> None:
            def again() -> None:
                kernel[grid](*arguments, **options)

            self.launches.append((label, again))
            again()

        return launch


def with_given_products(layer: GatedDelta | Mamba, given: tuple[torch.Tensor, ...]) -> GatedDelta | Mamba:
    """Makes a layer whose products are there already, so that they are not timed."""
    names = ("qkvz", "beta_alpha") if isinstance(layer, GatedDelta) else ("input",)
    return dataclasses.replace(layer, **dict(zip(names, (lambda _, v=value: v for value in given), strict=True)))


def by_rule(
    layer: GatedDelta | Mamba,
    given: tuple[torch.Tensor, ...],
    counts: tuple[int, ...],
    state: LayerState,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, matrices, tails) of torch in that dtype, token by token: the rule itself, without any pieces."""
    spec = layer.spec
    matrices, tails = state.matrices_SHKV.to(dtype), state.tails_SWC.to(dtype)
    first, *others = (x.to(dtype).unflatten(0, (len(counts), -1)) for x in given)  # [sequences, tokens, ...]
    if isinstance(layer, GatedDelta):
        heads, group = spec.num_value_heads, spec.num_value_heads // spec.num_key_heads
        sizes = [spec.key_size, spec.key_size, group * spec.value_size, group * spec.value_size]
        q, k, v, z = first.unflatten(-1, (spec.num_key_heads, -1)).split(sizes, -1)
        channels, z = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1), z.flatten(2)
    else:
        heads, group = spec.num_heads, spec.num_heads // spec.num_groups
        z, channels, steps = first.split([spec.inner_width, spec.num_channels, heads], -1)
    padded = torch.cat([tails, channels], 1)
    weight, bias = layer.conv_CW.to(dtype), getattr(layer, "conv_bias_C", None)
    windows = padded.unfold(1, spec.conv_width, 1)
    mixed = torch.nn.functional.silu((windows * weight).sum(-1) + (0 if bias is None else bias.to(dtype)))
    mixed = mixed.bfloat16().to(dtype)  # as it is kept between the kernels
    if isinstance(layer, GatedDelta):
        q, k, v = mixed.split([spec.key_width, spec.key_width, spec.value_width], -1)
        beta, alpha = others[0].unflatten(-1, (spec.num_key_heads, 2, group)).unbind(3)
        share, time_ = beta.flatten(2).sigmoid(), alpha.flatten(2)
    else:
        v, k, q = mixed.split([spec.inner_width, spec.group_width, spec.group_width], -1)
        time_ = steps
    q, k = (x.unflatten(-1, (heads // group, -1)).repeat_interleave(group, 2) for x in (q, k))
    v = v.unflatten(-1, (heads, -1))
    time_ = torch.nn.functional.softplus(time_ + layer.dt_bias_H.to(dtype))
    decay = (-layer.a_log_H.to(dtype).exp() * time_).exp()
    if isinstance(layer, GatedDelta):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * spec.key_size**-0.5
    else:
        share = time_
    read = []
    for place in range(first.shape[1]):
        matrices = matrices * decay[:, place, :, None, None]
        written = v[:, place]
        if isinstance(layer, GatedDelta):
            written = written - (matrices * k[:, place, :, :, None]).sum(-2)
        matrices = matrices + k[:, place, :, :, None] * (written * share[:, place, :, None])[..., None, :]
        read.append((matrices * q[:, place, :, :, None]).sum(-2))
    read = torch.stack(read, 1)
    if isinstance(layer, Mamba):
        read = read + layer.skip_H.to(dtype)[:, None] * v
    z = torch.nn.functional.silu(z)
    read = read if isinstance(layer, GatedDelta) else (read.flatten(2) * z)
    read = read * (read.square().mean(-1, keepdim=True) + layer.norm.eps).rsqrt() * layer.norm.weight.to(dtype)
    out = read.flatten(2) * z if isinstance(layer, GatedDelta) else read
    return out.flatten(0, 1), matrices, padded[:, 1 - spec.conv_width :]


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def try_tiles(name: str, run: Callable[[], object], num_tokens: int) -> None:
    """Times the layer with other tiles of one kernel after the other."""
    for kernel, tiles in TILES.items():
        if (kernel in ("singles", "convolve singles")) != (num_tokens <= MAX_SINGLES):
            continue
        usual, found = cuda_recurrence.TILES[kernel], []
        for tile in tiles:
            cuda_recurrence.TILES[kernel] = ColumnTile(num_columns=tile[0], num_warps=tile[1], num_stages=tile[2])
            try:
                found.append((microseconds(run), tile))
            except Exception as failure:  # the others are still worth knowing
                torch.cuda.synchronize()
                print(f"{name} {num_tokens} {kernel} {tile}: {str(failure)[:80]!r}", flush=True)
        cuda_recurrence.TILES[kernel] = usual
        print(f"{name} {num_tokens:>5} {kernel}: " + ", ".join(f"{us:.1f} {tile}" for us, tile in sorted(found)))


def measure(name: str, layer: GatedDelta | Mamba, num_tokens: int, *, tries_tiles: bool) -> None:
    counts = counts_of(num_tokens)
    state = new_state(layer.spec, len(counts))
    x_TM = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    given = tuple(linear(x_TM) for linear in layer.inputs)
    inputs = inputs_of(counts)
    tables = ChunkTables.of(inputs.query_starts, inputs.state_slots, dtype=torch.bfloat16, device=CUDA)
    inputs = inputs_of(counts, tables)
    ours, found_state = with_given_products(layer, given), copied(state)
    begun = time.monotonic()
    found = ours(x_TM, inputs, found_state)
    torch.cuda.synchronize()
    compiled_s = time.monotonic() - begun
    line = f"{name} {num_tokens:>5}"
    parts, kernels = Parts(), cuda_recurrence._kernels
    timed_state = copied(state)
    cuda_recurrence._kernels = parts
    try:
        ours(x_TM, inputs, timed_state)
    finally:
        cuda_recurrence._kernels = kernels
    for label, again in parts.launches:
        line += f" | {label} {microseconds(again):.1f}"
    whole = microseconds(lambda: ours(x_TM, inputs, timed_state))
    moved = 2 * (state.matrices_SHKV.nbytes + state.tails_SWC.nbytes)
    line += f" | whole {whole:.1f} us, {moved / whole / 1e3:.0f} GB/s of states, compiled in {compiled_s:.1f} s"
    print(line, flush=True)
    if tries_tiles:
        try_tiles(name, lambda: ours(x_TM, inputs, timed_state), num_tokens)
    truth, matrices, tails = by_rule(layer, given, counts, state, torch.float64)
    in_torch, torch_matrices, _ = by_rule(layer, given, counts, state, torch.float32)
    print(
        f"{name} {num_tokens:>5} error: output {error(found, truth):.2e} (torch in float32, rounded at the end "
        f"{error(in_torch.bfloat16(), truth):.2e}), state {error(found_state.matrices_SHKV, matrices):.2e} "
        f"({error(torch_matrices, matrices):.2e}), "
        f"tails {'equal' if torch.equal(found_state.tails_SWC, tails.bfloat16()) else 'DIFFER'}",
        flush=True,
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--tiles", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name in asked.shape or SHAPES:
        layer = layer_of(SHAPES[name])
        for num_tokens in asked.tokens or TOKENS:
            try:
                measure(name, layer, num_tokens, tries_tiles=asked.tiles)
            except Exception as failure:  # the other numbers of tokens are still worth knowing
                torch.cuda.synchronize()
                print(f"{name} {num_tokens}: {type(failure).__name__} {str(failure)[:1500]}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
