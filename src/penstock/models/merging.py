"""Weights with an adapter merged into them, matrix by matrix, while they are read or once they are there."""

# I inputs, O outputs, E experts, R rank

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.models.adapter import MERGE_BEFORE, WRAPPED, Adapter, LowRank
from penstock.models.groups import grouped
from penstock.models.quantized import QuantizedRows
from penstock.models.spec import DecoderSpec
from penstock.models.stored_names import EMBEDDINGS, FUSED_DOWN, FUSED_GATE, HEAD
from penstock.models.weights import SLICE_BYTES, ChangedWeights, SafetensorsWeights, WeightSource

# What stands before the layers of a text decoder, in a checkpoint or in a release of the library.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.", "")
MIXTURES = (("mlp.", "block_sparse_moe."), ("block_sparse_moe.", "mlp."))  # one room, called so by releases
HALVES = ({"gate_proj": 0, "up_proj": 1, "down_proj": None}, {"w1": 0, "w3": 1, "w2": None})
ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A low rank product, and which part of it goes to which part of a stored tensor."""

    module: str
    parts: LowRank
    expert: int | None = None  # of a product for a whole mixture; None: it is for one matrix
    half: int | None = None  # of its outputs, gate or up; None: all
    into_expert: int | None = None  # of a stored mixture
    into_half: int | None = None


class Merge:
    """What an adapter does to the tensors of a model.

    `shape_of` says None where a shape shows only later; `is_turned` tells what is stored as (inputs, outputs).
    `tied`: names of what is used twice.
    """

    def __init__(
        self,
        adapter: Adapter,
        names: Iterable[str],
        shape_of: Callable[[str], tuple[int, ...] | None],
        *,
        is_turned: Callable[[str], bool] = lambda name: False,
        tied: Collection[str] = (),
    ) -> None:
        self._adapter = adapter
        self._tensors = SafetensorsWeights([adapter.path])
        self._read = lru_cache(maxsize=4)(self._values)  # what a mixture has for all experts is read once
        self._names = frozenset(names)
        self._prefixes = [name.removesuffix(EMBEDDINGS) for name in sorted(self._names) if name.endswith(EMBEDDINGS)]
        self._is_turned = is_turned
        self._products: dict[str, list[Product]] = {}
        self._replaced: dict[str, str] = {}
        for path, tensor in adapter.replaced.items():
            self._replaced[self._found(path, path)] = tensor
        for module, parts in adapter.low_rank.items():
            for name, product in self._placed(module, parts):
                self._products.setdefault(name, []).append(product)
        self.unused = {*self._products, *self._replaced}
        if shared := sorted(self.unused.intersection(tied)):
            raise UnsupportedModel(
                f"Adapter {adapter.name!r} changes {shared[0]!r}, which this model uses for embeddings and head alike. "
                f"{MERGE_BEFORE}."
            )
        self.names = frozenset(self.unused)
        for name in self.names:
            if (shape := shape_of(name)) is not None:
                self._check(name, shape)

    @torch.no_grad()
    def apply(self, name: str, stored: torch.Tensor) -> None:
        """Changes a tensor, of any float type and maybe a view, as the adapter says."""
        self._check(name, tuple(stored.shape))
        self.unused.discard(name)
        if name in self._replaced:
            self._tensors.copy_into(stored, self._replaced[name])
        for product in self._products.get(name, ()):
            matrix = stored if product.into_expert is None else stored[product.into_expert]
            matrix_OI = matrix.t() if self._is_turned(name) != product.parts.is_embedding else matrix
            if product.into_half is not None:
                matrix_OI = matrix_OI.chunk(2)[product.into_half]
            self._add(matrix_OI, product)

    def require_all_used(self, lane: str) -> None:
        if self.unused:
            raise UnsupportedModel(
                f"Adapter {self._adapter.name!r} changes {min(self.unused)!r}, which lane {lane} does not read. Take "
                f"a lane of transformers with --lane, or: {MERGE_BEFORE}."
            )

    # --- which tensor ---------------------------------------------------------------------------------------

    def _placed(self, module: str, parts: LowRank) -> Iterable[tuple[str, Product]]:
        name = self._find(f"{module}.weight")
        if name is not None:
            yield name, Product(module=module, parts=parts)
        elif (parameter := self._parameter(module)) is not None:
            yield from self._of_mixture(parameter, parts)
        elif found := ONE_EXPERT.fullmatch(module):
            mixture, expert, kind = found.groups()
            half = next((halves[kind] for halves in HALVES if kind in halves), None)
            fused = self._found(f"{mixture}.{FUSED_DOWN if kind in ('down_proj', 'w2') else FUSED_GATE}", module)
            yield fused, Product(module=module, parts=parts, into_expert=int(expert), into_half=half)
        else:
            self._found(module, module)

    def _parameter(self, module: str) -> str | None:
        """The parameter of a mixture that PEFT's config targets by name: the first is wrapped by the next."""
        own, depth = module.replace(WRAPPED, ""), module.count(WRAPPED)
        targets = self._adapter.config.get("target_parameters") or ()
        found = {target.rpartition(".")[2] for target in targets if f".{own}".endswith(f".{target.rpartition('.')[0]}")}
        order = sorted(found, key=lambda name: (FUSED_DOWN not in name, name))
        return f"{own}.{order[depth]}" if depth < len(order) else None

    def _of_mixture(self, parameter: str, parts: LowRank) -> Iterable[tuple[str, Product]]:
        mixture, _, kind = parameter.rpartition(".")
        num_experts = self._tensors.shape(parts.a)[0] // self._adapter.rank(parameter)
        name, is_down = self._find(parameter), kind == FUSED_DOWN
        for expert in range(num_experts):
            product, place = Product(module=parameter, parts=parts, expert=expert), f"{mixture}.{expert}"
            if name is not None:
                yield name, replace(product, into_expert=expert)
                continue
            one = next((all_of for all_of in HALVES if self._find(f"{place}.{next(iter(all_of))}.weight")), {})
            kinds = {part: half for part, half in one.items() if (half is None) == is_down}
            if not kinds:
                self._found(parameter, parameter)
            for part, half in kinds.items():
                yield self._found(f"{place}.{part}.weight", parameter), replace(product, half=half)

    def _find(self, path: str) -> str | None:
        """The stored name of a tensor that an adapter calls as some release of the library does."""
        rests = [path.removeprefix(prefix) for prefix in TEXT_PREFIXES if path.startswith(prefix)]
        tries = [path, *(f"{prefix}{rest}" for prefix in self._prefixes for rest in rests)]
        tries += [one.replace(f".{a}", f".{b}") for one in tries for a, b in MIXTURES if f".{a}" in one]
        if path.endswith(HEAD):
            tries += [name for name in self._names if name.endswith(HEAD)]
        return next((one for one in tries if one in self._names), None)

    def _found(self, path: str, module: str) -> str:
        name = self._find(path)
        if name is None:
            raise InvalidModelFile(
                f"Adapter {self._adapter.name!r} changes {module!r}, which this model does not have as a weight of its "
                f"own; it was made for {self._adapter.base}. Load that model."
            )
        return name

    # --- how it changes -------------------------------------------------------------------------------------

    def _check(self, name: str, stored: tuple[int, ...]) -> None:
        if name in self._replaced and (given := self._tensors.shape(self._replaced[name])) != stored:
            raise self._misfit(name, stored, given)
        for product in self._products.get(name, ()):
            rank, (num_rows, num_inputs) = self._adapter.rank(product.module), self._tensors.shape(product.parts.a)
            num_outputs, num_columns = self._tensors.shape(product.parts.b)
            outputs = num_outputs // (1 if product.half is None else 2) * (1 if product.into_half is None else 2)
            one = (outputs, num_inputs)
            one = one[::-1] if self._is_turned(name) != product.parts.is_embedding else one
            experts = 1 if product.expert is None else num_rows // rank
            given = one if product.into_expert is None else (stored[0], *one)
            count = stored[0] if product.expert is not None and product.into_expert is not None else experts
            if given != stored or num_rows != num_columns or num_rows != rank * experts or count != experts:
                raise self._misfit(name, stored, given, f" with ranks {num_rows} and {num_columns}, of {rank} each")
            if (product.into_expert or 0) >= (stored[0] if product.into_expert is not None else 1):
                raise self._misfit(name, stored, given, f" for expert {product.into_expert}")

    def _misfit(self, name: str, stored: tuple[int, ...], given: tuple[int, ...], more: str = "") -> InvalidModelFile:
        return InvalidModelFile(
            f"Adapter {self._adapter.name!r} does not fit: {name!r} has shape {stored}, the adapter's {given}{more}; "
            f"it was made for {self._adapter.base}. Load that model."
        )

    def _add(self, matrix_OI: torch.Tensor, product: Product) -> None:
        """Adds a product in float32 and in slices; the matrix keeps its type."""
        a_RI, b_OR = (self._read(name).to(matrix_OI.device) for name in (product.parts.a, product.parts.b))
        if product.expert is not None:
            rank = self._adapter.rank(product.module)
            a_RI = a_RI.view(-1, rank, a_RI.shape[1])[product.expert]
            b_OR = b_OR.view(len(b_OR), rank, -1)[..., product.expert]
        if product.half is not None:
            b_OR = b_OR.chunk(2)[product.half]
        scale, name = self._adapter.scale(product.module), product.parts.magnitude
        lengths_O = None if name is None else self._read(name).to(matrix_OI.device).flatten()
        if lengths_O is not None and len(lengths_O) != len(matrix_OI):
            raise self._misfit(product.module, tuple(matrix_OI.shape), tuple(lengths_O.shape))
        step = max(1, SLICE_BYTES // (4 * matrix_OI.shape[1]))
        for first in range(0, len(matrix_OI), step):
            rows = slice(first, first + step)
            sum_OI = matrix_OI[rows].float().add_(b_OR[rows] @ a_RI, alpha=scale)
            if lengths_O is not None:
                sum_OI *= (lengths_O[rows] / torch.linalg.norm(sum_OI, dim=1))[:, None]
            matrix_OI[rows] = sum_OI.to(matrix_OI.dtype)

    def _values(self, name: str) -> torch.Tensor:
        values = torch.empty(self._tensors.shape(name))
        self._tensors.copy_into(values, name)
        return values


class AdaptedWeights(ChangedWeights):
    """A source whose tensors have an adapter merged into them."""

    def __init__(self, source: WeightSource, merge: Merge) -> None:
        super().__init__(source, merge.names)
        self.merge = merge

    @classmethod
    def of(cls, source: WeightSource, adapter: Adapter, spec: DecoderSpec) -> AdaptedWeights:
        turned = spec.experts is not None and spec.experts.names.layout == "inputs first"
        names = {name.removesuffix("_blocks") for name in source.names}
        merge = Merge(
            adapter,
            names,
            lambda name: source.shape(name) if name in source.names else None,
            is_turned=lambda name: turned and name.endswith((FUSED_GATE, FUSED_DOWN)),
            tied=[name for name in names if name.endswith((EMBEDDINGS, HEAD))] if spec.has_tied_embeddings else (),
        )
        return cls(source, merge)

    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        self.source.copy_into(destination, name)
        if name in self.changed:
            self.merge.apply(name, destination)

    def quantize_into(self, destination: QuantizedRows, name: str) -> None:
        if name not in self.changed:
            self.source.quantize_into(destination, name)
            return
        values = torch.empty(destination.shape)
        self.copy_into(values, name)
        destination.fill(0, grouped(values.numpy(), destination.kind))


@torch.no_grad()
def merge_into(model: torch.nn.Module, adapter: Adapter) -> None:
    """Merges an adapter into a loaded model of transformers."""
    from transformers.pytorch_utils import Conv1D

    parameters = dict(model.named_parameters(remove_duplicate=False))
    places: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        places.setdefault(parameter.data_ptr(), []).append(name)

    def is_turned(name: str) -> bool:
        module = model.get_submodule(name.rpartition(".")[0])
        return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))

    merge = Merge(
        adapter,
        parameters,
        lambda name: tuple(parameters[name].shape),
        is_turned=is_turned,
        tied=[name for names in places.values() if len(names) > 1 for name in names],
    )
    for name in merge.names:
        merge.apply(name, parameters[name].data)
