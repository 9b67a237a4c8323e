"""Times every kernel of a mixture of experts on this GPU, with several tiles for each number of tokens.

    python benchmarks/h200/experts_kernels.py [--shape qwen3-30b-a3b ...] [--tokens 1 --tokens 64 ...] [--seconds 40]

Each line has microseconds, GB/s of the weights that are read, and TFLOP/s; the last lines say which tile was fastest.
Launches are recorded and replayed over several routings, so that neither the host nor a cache is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from replays import replayed_us

from penstock.models import cuda_experts
from penstock.models.cuda_experts import ProductTile, Routed, Sorted, tile_shapes
from penstock.models.experts import Experts
from penstock.models.layer_specs import ExpertNames, ExpertsSpec
from penstock.models.mxfp4 import Mxfp4Matrices, mxfp4_values

NUM_ROUTINGS, NUM_REPLAYS = 8, 5
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 2048, 8192)
# (experts, of a token, inner size, shared size, hidden size)
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 768, 0, 2048),
    "64-experts-of-1408": (64, 6, 1408, 2816, 2048),
    "mixtral": (8, 2, 14336, 0, 4096),
    "gpt-oss-20b": (32, 4, 2880, 0, 2880),
    "gpt-oss-20b-mxfp4": (32, 4, 2880, 0, 2880),
}
Best = tuple[float, str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One routing of the tokens; how many experts it reads."""

    x_TM: torch.Tensor
    routed: Routed
    num_read: int


def mixture(name: str) -> Experts:
    count, active, inner, shared, hidden = SHAPES[name]
    spec = ExpertsSpec(
        num_experts=count,
        num_active=active,
        intermediate_size=inner,
        normalizes_chosen=True,
        names=ExpertNames(),
        shared_size=shared,
        has_shared_gate=False,
        **({"has_biases": True, "clamp": 7.0, "clamp_alpha": 1.702} if name.startswith("gpt-oss") else {}),
    )
    made = Experts.empty(spec, hidden, "silu", dtype=torch.bfloat16, device=torch.device("cuda"))
    for tensor in (made.gate_up_EFM, made.down_EMF, made.gate_up_bias_EF, made.down_bias_EM, made.router.weight_OI):
        if tensor is not None:
            tensor.normal_(0, 0.02)
    if made.router.bias_O is not None:
        made.router.bias_O.zero_()
    if made.shared is not None:
        made.shared.first.weight_OI.normal_(0, 0.02)
        made.shared.down.weight_OI.normal_(0, 0.02)
    return made


def coded(plain: Experts) -> Experts:
    """Random codes; `plain` is given what they stand for."""
    found = {}
    for name in ("gate_up", "down"):
        values_EOI = getattr(plain, name)
        count, outs, ins = values_EOI.shape
        device, is_alternating = values_EOI.device, name == "gate_up"
        found[name] = Mxfp4Matrices.empty(count, outs, ins, is_alternating=is_alternating, device=device)
        for expert in range(count):
            codes = torch.randint(0, 256, (outs, ins // 32, 16), dtype=torch.uint8, device=device)
            powers = torch.randint(118, 122, (outs, ins // 32), dtype=torch.uint8, device=device)
            found[name].take(expert, codes, powers)
            values_EOI[expert] = mxfp4_values(codes.flatten(), powers.flatten()).view(outs, ins)
    made = replace(plain, gate_up_bias_EF=plain.gate_up_bias_EF.clone(), **found)
    made.settle(plain.down.shape[1])
    return made


def routings(experts: Experts, num_tokens: int) -> list[Inputs]:
    """Experts are drawn evenly."""
    found = []
    for _ in range(NUM_ROUTINGS):
        chosen = torch.rand(num_tokens, experts.spec.num_experts, device="cuda").topk(experts.spec.num_active).indices
        weights = torch.rand(chosen.shape, device="cuda").softmax(-1)
        x_TM = torch.randn(num_tokens, experts.down.shape[1], dtype=torch.bfloat16, device="cuda")
        routed = Routed(experts_TA=chosen.int(), weights_TA=weights)
        found.append(Inputs(x_TM=x_TM, routed=routed, num_read=len(chosen.unique())))
    return found


def tile(outs: int, columns: int, warps: int, stages: int) -> ProductTile:
    return ProductTile(num_outs=outs, num_columns=columns, num_warps=warps, num_stages=stages)


def row_counts(mean: float) -> tuple[int, ...]:
    """Rows of a tile that are worth trying where an expert has so many."""
    return tuple(size for size in (16, 32, 64, 128) if size <= max(16, 2 * mean) and size >= min(64, mean / 4))


GATE_UP_TILES = {
    16: [tile(32, 128, 4, 4), tile(64, 64, 4, 5), tile(64, 128, 4, 3), tile(64, 128, 8, 4), tile(32, 256, 4, 3),
         tile(64, 256, 4, 2), tile(128, 64, 8, 4)],
    32: [tile(64, 64, 4, 4), tile(64, 128, 4, 3), tile(64, 128, 8, 4), tile(128, 64, 8, 4)],
    64: [tile(64, 64, 4, 4), tile(64, 128, 4, 3), tile(128, 64, 4, 3), tile(128, 64, 8, 3), tile(128, 64, 8, 4)],
    128: [tile(64, 64, 4, 4), tile(64, 64, 8, 4), tile(128, 64, 8, 3), tile(128, 64, 8, 4), tile(128, 32, 8, 5)],
}  # fmt: skip
DOWN_TILES = {
    16: [tile(64, 128, 4, 4), tile(64, 64, 4, 5), tile(128, 64, 4, 4), tile(128, 128, 4, 3), tile(64, 256, 4, 3),
         tile(32, 256, 4, 4), tile(128, 128, 8, 4)],
    32: [tile(64, 128, 4, 4), tile(128, 64, 4, 4), tile(128, 128, 4, 3), tile(128, 128, 8, 4)],
    64: [tile(128, 64, 4, 4), tile(128, 128, 8, 3), tile(128, 64, 8, 4), tile(256, 64, 8, 3)],
    128: [tile(128, 64, 8, 3), tile(128, 64, 8, 4), tile(128, 64, 4, 3), tile(256, 64, 8, 3), tile(256, 64, 8, 4)],
}  # fmt: skip
CODED_TILES = {
    16: [tile(outs, 128, outs // 16, stages) for outs in (32, 64, 128) for stages in (3, 4, 6)],
    32: [tile(outs, 128, 4, stages) for outs in (64, 128) for stages in (3, 4, 5)] + [tile(128, 128, 8, 4)],
    64: [tile(outs, 128, 4, stages) for outs in (64, 128) for stages in (3, 4)] + [tile(128, 128, 8, 3)],
    128: [tile(64, 128, 4, 2), tile(64, 128, 4, 3), tile(64, 128, 4, 4), tile(128, 128, 8, 2),
          tile(128, 128, 8, 3), tile(128, 128, 8, 4), tile(256, 128, 8, 3)],
    256: [tile(64, 128, 4, 2), tile(64, 128, 4, 3), tile(64, 128, 8, 3), tile(128, 128, 8, 2), tile(128, 128, 8, 3)],
}  # fmt: skip
ALONE_GATE_UP = [tile(outs, columns, warps, 1) for outs in (1, 2, 4) for columns in (1024, 2048) for warps in (4, 8)]
ALONE_DOWN = [tile(outs, columns, warps, 1) for outs in (1, 2, 4) for columns in (128, 256, 512) for warps in (4, 8)]


class Sweep:
    """One shape and number of tokens, within its time."""

    def __init__(self, name: str, experts: Experts, num_tokens: int, seconds: float, plain: Experts | None) -> None:
        """`plain`: the same with the values of codes; None: there are no codes."""
        self.name, self.experts, self.num_tokens, self.plain = name, experts, num_tokens, plain
        self.value_bytes = 2 if plain is None else 17 / 32
        self.gate_up_tiles = GATE_UP_TILES if plain is None else CODED_TILES
        self.down_tiles = DOWN_TILES if plain is None else CODED_TILES
        self.inputs = routings(experts, num_tokens)
        self.deadline = time.monotonic() + seconds
        self.best: dict[str, Best] = {}
        hidden, inner = experts.down.shape[1], experts.spec.intermediate_size
        self.matrix = hidden * inner
        self.num_read = sum(one.num_read for one in self.inputs) / NUM_ROUTINGS

    def run(self) -> dict[str, Best]:
        experts, inputs = self.experts, self.inputs
        mean = self.num_tokens * experts.spec.num_active / experts.spec.num_experts
        self._time("route", "", lambda i: cuda_experts.route(experts, inputs[i].x_TM), 0)
        self._time("whole, by the table", "", lambda i: cuda_experts.mixed(experts, inputs[i].x_TM), 3)
        if self.num_tokens <= 16 and self.plain is None:
            self._alone()
        for rows in row_counts(mean):
            self._in_tiles(rows)
        if self.plain is not None and mean >= 256:
            self._in_tiles(256)
        return self.best

    def _alone(self) -> None:
        experts, inputs = self.experts, self.inputs
        inners = [cuda_experts.gate_up_alone(experts, one.x_TM, one.routed) for one in inputs]
        outs = [torch.zeros_like(one.x_TM) for one in inputs]
        for shape in ALONE_GATE_UP:
            self._time(
                "gate and up, alone", shape,
                lambda i, shape=shape: cuda_experts.gate_up_alone(experts, inputs[i].x_TM, inputs[i].routed, shape), 2,
            )  # fmt: skip
        for shape in ALONE_DOWN:
            self._time(
                "down, alone", shape,
                lambda i, shape=shape: cuda_experts.down_alone(
                    experts, outs[i], inners[i], inputs[i].routed, shape, adds=True
                ), 1,
            )  # fmt: skip

    def _in_tiles(self, rows: int) -> None:
        experts, inputs = self.experts, self.inputs
        num_experts = experts.spec.num_experts
        self._time(f"sort, {rows} rows", "", lambda i: cuda_experts.sort(inputs[i].routed, num_experts, rows), 0)
        placed = [cuda_experts.sort(one.routed, num_experts, rows) for one in inputs]
        inners = [
            cuda_experts.gate_up_tiles(experts, one.x_TM, order, self.gate_up_tiles[rows][0])
            for one, order in zip(inputs, placed, strict=True)
        ]
        if self.plain is not None:
            self._compare(rows, placed[0], inners[0])
        else:
            self._check(rows, placed[0], inners[0])
        parts = [
            cuda_experts.down_tiles(experts, inner, one.routed, order, self.down_tiles[rows][0])
            for inner, one, order in zip(inners, inputs, placed, strict=True)
        ]
        out_TM = torch.zeros_like(inputs[0].x_TM)
        if "sum" not in self.best:
            self._time("sum", "", lambda i: cuda_experts.sum_parts(out_TM, parts[i], adds=True), 0)
        for shape in self.gate_up_tiles[rows]:
            self._time(
                f"gate and up, {rows} rows", shape,
                lambda i, shape=shape: cuda_experts.gate_up_tiles(experts, inputs[i].x_TM, placed[i], shape), 2,
            )  # fmt: skip
        for shape in self.down_tiles[rows]:
            self._time(
                f"down, {rows} rows", shape,
                lambda i, shape=shape: cuda_experts.down_tiles(
                    experts, inners[i], inputs[i].routed, placed[i], shape
                ), 1,
            )  # fmt: skip

    def _check(self, rows: int, placed: Sorted, inner_RF: torch.Tensor) -> None:
        exact = self._exact_inner(0, placed.order_R)
        error = ((inner_RF.float() - exact).norm() / exact.norm()).item()
        if not error < 1e-2:
            print(f"!! gate and up in tiles of {rows} rows is off by {error:.1e}", flush=True)

    def _compare(self, rows: int, placed: Sorted, inner_RF: torch.Tensor) -> None:
        """Says how codes differ from their values in bfloat16."""
        one, tiles = self.inputs[0], tile_shapes(rows * 32, 32, torch.bfloat16)
        down = self.down_tiles[rows][0]
        pairs = {
            "gate and up": (inner_RF, cuda_experts.gate_up_tiles(self.plain, one.x_TM, placed, tiles.gate_up)),
            "down": tuple(
                cuda_experts.down_tiles(experts, inner_RF, one.routed, placed, shape)
                for experts, shape in ((self.experts, down), (self.plain, tiles.down))
            ),
        }
        for name, (found, expected) in pairs.items():
            error = ((found - expected).float().norm() / expected.float().norm()).item()
            told = "bit for bit" if torch.equal(found, expected) else f"but for {error:.1e}"
            print(f"{self.name} {self.num_tokens:>5} {name}, {rows} rows: as its values give, {told}", flush=True)

    def _exact_inner(self, index: int, order_R: torch.Tensor) -> torch.Tensor:
        """[R, F] of the first rows in float32, by torch; only experts without biases are held to it."""
        experts, one = self.experts, self.inputs[index]
        if experts.gate_up_bias_EF is not None:
            return cuda_experts.gate_up_alone(experts, one.x_TM, one.routed)[order_R.long()].float()
        chosen = one.routed.experts_TA.flatten()[order_R.long()]
        found = torch.empty(len(order_R), experts.spec.intermediate_size, device="cuda")
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().flatten()
            tokens = order_R[rows].long() // experts.spec.num_active
            gate, up = (one.x_TM[tokens] @ experts.gate_up_EFM[expert].t()).float().chunk(2, -1)
            found[rows] = torch.nn.functional.silu(gate) * up
        return found

    def _time(self, kernel: str, shape: object, run: Callable[[int], object], num_matrices: int) -> None:
        if time.monotonic() > self.deadline:
            return
        try:
            us = min(replayed_us(run, num_calls=NUM_ROUTINGS, num_replays=NUM_REPLAYS))
        except Exception as error:  # a tile that does not fit or compile is left out, and the others go on
            torch.cuda.synchronize()
            print(f"{self.name} {self.num_tokens:>5} {kernel:<22} {_short(shape)}: {str(error)[:100]!r}", flush=True)
            return
        if kernel not in self.best or us < self.best[kernel][0]:
            self.best[kernel] = (us, _short(shape), shape)
        line = f"{self.name} {self.num_tokens:>5} {kernel:<22} {_short(shape):<22} {us:>9.1f} us"
        if num_matrices:
            read = num_matrices * self.matrix * self.value_bytes * self.num_read
            work = 2 * num_matrices * self.matrix * self.num_tokens * self.experts.spec.num_active
            line += f" {read / us / 1e3:>7.0f} GB/s {work / us / 1e6:>6.1f} TFLOP/s"
        print(line, flush=True)


def _short(shape: object) -> str:
    if isinstance(shape, ProductTile):
        return f"{shape.num_outs}x{shape.num_columns} w{shape.num_warps} s{shape.num_stages}"
    return ""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--seconds", type=float, default=40, help="The most for one shape and number of tokens.")
    asked = parser.parse_args()
    torch.manual_seed(0)
    best: dict[str, dict[int, dict[str, Best]]] = {}
    for name in asked.shape or SHAPES:
        experts, plain = mixture(name), None
        if name.endswith("mxfp4"):
            experts, plain = coded(experts), experts
        for num_tokens in asked.tokens or TOKENS:
            try:
                best.setdefault(name, {})[num_tokens] = Sweep(name, experts, num_tokens, asked.seconds, plain).run()
            except Exception as error:  # the other numbers of tokens are still worth knowing
                print(f"{name} {num_tokens}: {str(error)[:200]!r}", flush=True)
        del experts, plain
        torch.cuda.empty_cache()
    for name, by_tokens in best.items():
        for num_tokens, found in by_tokens.items():
            kernels = "; ".join(f"{kernel} {us:.1f} us {shape}".strip() for kernel, (us, shape, _) in found.items())
            print(f"BEST {name} {num_tokens:>5}: {kernels}")
    short = {
        name: {tokens: {kernel: one[:2] for kernel, one in found.items()} for tokens, found in by_tokens.items()}
        for name, by_tokens in best.items()
    }
    print("RESULT", json.dumps(short))


if __name__ == "__main__":
    main()
