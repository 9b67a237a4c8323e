"""Tensors of a GGUF file under Hugging Face's names, and how each is laid out there."""

# E experts, K key heads, R value heads of a key head

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from penstock.errors import InvalidModelFile, UnsupportedModel, brief
from penstock.models.families import renamed
from penstock.models.gguf import GgufFile, GgufTensor
from penstock.models.gguf_architectures import ARCHITECTURES, MIXTRAL, OUTSIDE, Architecture
from penstock.models.gguf_keys import Keys

_ROTARY_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
MAX_EXPERTS = 4096
_VALUE_ROWS = frozenset({"attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_conv1d"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stored tensor, and what turns its values into those of Hugging Face's tensor, of which it may be a part."""

    stored: GgufTensor
    first_row: int = 0  # of the whole, where its rows begin
    places: np.ndarray | None = None  # in the whole, of its rows, or of its values if it is a vector; None: one by one
    columns: np.ndarray | None = None  # in the whole, of its columns
    subtract: float = 0.0
    is_decay: bool = False  # stored is minus the exponential

    @property
    def rows(self) -> np.ndarray | slice:
        """Tells which rows of the whole these are."""
        if self.places is not None:
            return self.places
        return slice(self.first_row, self.first_row + prod(self.stored.shape[:-1]))

    @property
    def is_as_stored(self) -> bool:
        """Tells whether nothing turns its values into others, or moves them."""
        is_moved = self.places is not None or self.columns is not None
        return not (is_moved or self.subtract or self.is_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTensor:
    shape: tuple[int, ...]  # Hugging Face's, but for dimensions of one
    pieces: tuple[Piece, ...]
    is_turned: bool = False  # the last two dimensions are the other way round in the pieces, and in `shape`

    @property
    def stored(self) -> GgufTensor:
        return self.pieces[0].stored


def architecture(gguf: GgufFile) -> tuple[str, Architecture]:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InvalidModelFile(
            f"{gguf.path} does not say its general.architecture ({brief(name)}); convert the model again."
        )
    if name == "clip":
        raise UnsupportedModel(
            f"{gguf.path} holds the tower of an image-text model alone; pass the GGUF of its text part, or the model's "
            "safetensors folder to read images."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{gguf.path} holds the architecture {brief(name)}; GGUF is read for {', '.join(ARCHITECTURES)}, "
            "so use the model's safetensors folder instead."
        )
    has_experts = name == "llama" and gguf.metadata.get("llama.expert_count") not in (None, 0)
    return name, MIXTRAL if has_experts else ARCHITECTURES[name]


def hf_tensor_name(gguf_name: str, family: Architecture) -> str | None:
    """The Hugging Face name of a stored tensor, or two with a blank; None for one that its models do not have."""
    match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", gguf_name)
    names, rest = (family.names, match[2]) if match else (OUTSIDE, gguf_name)
    stem, _, suffix = rest.rpartition(".")
    if rest in names:
        theirs = names[rest]
    elif stem in names and suffix in (("weight", "bias") if match else ("weight",)):
        theirs = " ".join(f"{name}.{suffix}" for name in names[stem].split())
    else:
        return None
    ours = " ".join(f"model.layers.{int(match[1])}.{name}" for name in theirs.split()) if match else theirs
    return renamed(ours, family.family.traits.get("renames", ()))


def hf_tensors(gguf: GgufFile) -> dict[str, HfTensor]:
    """Every weight under its Hugging Face name; a tensor that would be left out refuses the model."""
    name, family = architecture(gguf)
    layouts = _Layouts(Keys(gguf, name), family)
    found: dict[str, list[Piece]] = {}
    for stored in gguf.tensors.values():
        theirs = hf_tensor_name(stored.name, family)
        if theirs is not None and not layouts.is_draft(stored):
            for hf_name, piece in layouts.pieces(stored, theirs):
                found.setdefault(hf_name, []).append(piece)
        elif theirs is None and stored.name not in _ROTARY_TENSORS and not layouts.is_draft(stored):
            raise UnsupportedModel(
                f"{gguf.path} holds tensor {stored.name!r}, which {name} models do not have; "
                "use the model's safetensors folder instead."
            )
    return {hf_name: layouts.whole(pieces) for hf_name, pieces in found.items()}


def num_layers(keys: Keys) -> int:
    """Counts the layers that run; behind them may be some that guess tokens ahead."""
    count = keys.integer("block_count")
    drafting = keys.raw("nextn_predict_layers", 0)
    if type(drafting) is not int or not 0 <= drafting < count:
        raise keys.refuse("nextn_predict_layers", drafting, f"a part of {count} layers")
    return count - drafting


def _stem(stored: GgufTensor) -> str:
    """blk.3.attn_q.bias is attn_q."""
    return re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", stored.name)


class _Layouts:
    """Finds the pieces of an architecture's tensors."""

    def __init__(self, keys: Keys, family: Architecture) -> None:
        self._keys, self._family = keys, family
        heads = keys.integer("attention.head_count")
        self._heads = {"attn_q": heads}
        if family.interleaves_rotary_rows:
            self._heads["attn_k"] = keys.integer("attention.head_count_kv", heads, skips_zeros=True)
        self._num_layers = num_layers(keys) if keys.raw("nextn_predict_layers") else None

    def is_draft(self, stored: GgufTensor) -> bool:
        match = re.match(r"blk\.(\d{1,9})\.", stored.name)
        return self._num_layers is not None and match is not None and int(match[1]) >= self._num_layers

    def pieces(self, stored: GgufTensor, theirs: str) -> Iterator[tuple[str, Piece]]:
        """Yields (Hugging Face name, piece): several of a tensor that holds several, such as all experts."""
        names = theirs.split()
        if "{}" not in theirs:
            yield theirs, self._piece(stored)
            return
        if len(stored.shape) != 3 or stored.shape[0] > MAX_EXPERTS or stored.shape[1] % len(names):
            raise self._misfit(stored, f"a matrix for each of at most {MAX_EXPERTS} experts")
        if (count := self._keys.integer("expert_count")) != stored.shape[0]:
            raise self._misfit(stored, f"one matrix for each of {count} experts")
        for index, part in enumerate(_cut(stored, stored.shape[0] * len(names))):
            expert, place = divmod(index, len(names))
            yield names[place].format(expert), Piece(stored=part)

    def _piece(self, stored: GgufTensor) -> Piece:
        stem, family = _stem(stored), self._family
        if stem == "ssm_norm":
            return Piece(stored=replace(stored, shape=(prod(stored.shape),)))
        offset = family.family.traits.get(
            "norm_offset", 0.0
        )  # which the converter added to every norm but recurrent ones
        if offset and stem.endswith("norm") and stored.name.endswith(".weight"):
            return Piece(stored=stored, subtract=offset)
        heads = self._heads.get(stem) if family.interleaves_rotary_rows else None
        if heads and stored.shape[0] % (2 * heads):
            raise self._misfit(stored, f"rows that divide into {heads} even heads")
        if heads:  # stored as (heads, pairs, 2, ...); rotary halves come first in Hugging Face's order
            places = np.arange(stored.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
            return Piece(stored=stored, places=places)
        piece = Piece(stored=stored, is_decay=stem == "ssm_a")
        if family.tiles_value_heads and stem in _VALUE_ROWS:
            return replace(piece, places=self._untiled(stored))
        if family.tiles_value_heads and stem == "ssm_out":
            return replace(piece, columns=self._untiled(stored, axis=1))
        if family.model_type == "qwen3_next" and stem in ("attn_qkv", "attn_gate"):
            return replace(piece, places=self._by_key_head(stored, stem))
        return piece

    def whole(self, pieces: list[Piece]) -> HfTensor:
        first = pieces[0].stored
        is_alternating = self._family.alternates_experts
        if len(pieces) == 1:
            is_turned = is_alternating and len(first.shape) == 3
            return HfTensor(shape=_turned(first.shape, is_turned), pieces=tuple(pieces), is_turned=is_turned)
        if pieces[0].places is not None:
            num_rows = sum(piece.stored.shape[0] for piece in pieces)
            return HfTensor(shape=(num_rows, *first.shape[1:]), pieces=tuple(pieces))
        # The gate first; names are in the order of the file.
        pieces = sorted(pieces, key=lambda piece: "gate" not in piece.stored.name)
        if any(piece.stored.shape != first.shape for piece in pieces) or len(pieces) != 2:
            raise self._misfit(first, "of the shape of what it belongs to")
        if len(first.shape) == 2 and first.name.endswith(".weight"):
            gate, up = pieces
            shape = (2 * first.shape[0], first.shape[1])
            return HfTensor(shape=shape, pieces=(gate, replace(up, first_row=first.shape[0])))
        num_experts, inner = first.shape[:2]
        shape, is_turned = (num_experts, 2 * inner, *first.shape[2:]), is_alternating and len(first.shape) == 3
        of_experts = 2 * inner * np.arange(num_experts)[:, None]
        inside = 2 * np.arange(inner) if is_alternating else np.arange(inner)
        step = 1 if is_alternating else inner
        placed = (
            replace(piece, places=(of_experts + inside + step * index).ravel()) for index, piece in enumerate(pieces)
        )
        return HfTensor(shape=_turned(shape, is_turned), pieces=tuple(placed), is_turned=is_turned)

    def _value_heads(self) -> tuple[int, int, int, int]:
        """Gives the key heads, the value heads of each, the size of a key and that of a value."""
        keys, values = self._keys.integer("ssm.group_count"), self._keys.integer("ssm.time_step_rank")
        inner = self._keys.integer("ssm.inner_size")
        if values % keys or inner % values:
            raise self._keys.refuse("ssm.time_step_rank", values, f"heads for {inner} values and {keys} key heads")
        return keys, values // keys, self._keys.integer("ssm.state_size"), inner // values

    def _untiled(self, stored: GgufTensor, axis: int = 0) -> np.ndarray:
        """Finds the places of rows, or of columns, whose last are values; there, heads come by turns of key heads."""
        K, R, key_size, value_size = self._value_heads()
        stem, count = _stem(stored), stored.shape[axis]
        before = 2 * K * key_size if stem in ("attn_qkv", "ssm_conv1d") else 0
        size = 1 if stem in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else value_size
        if count != before + K * R * size:
            raise self._misfit(stored, f"with {before + K * R * size} rows or columns for its heads")
        heads = np.arange(K * R).reshape(K, R).T.ravel()
        values = (heads[:, None] * size + np.arange(size)).ravel()
        return np.concatenate([np.arange(before), before + values])

    def _by_key_head(self, stored: GgufTensor, stem: str) -> np.ndarray:
        """Finds the places of rows in a matrix that has queries, keys, values and gates of each key head together."""
        K, R, key_size, value_size = self._value_heads()
        sizes = [key_size, key_size, R * value_size, R * value_size]
        starts, of_group = np.cumsum([0, *sizes]), sum(sizes) * np.arange(K)[:, None]
        parts = range(3) if stem == "attn_qkv" else range(3, 4)
        places = np.concatenate([(of_group + starts[part] + np.arange(sizes[part])).ravel() for part in parts])
        if len(places) != stored.shape[0]:
            raise self._misfit(stored, f"{len(places)} rows")
        return places

    def _misfit(self, stored: GgufTensor, wanted: str) -> InvalidModelFile:
        return InvalidModelFile(
            f"{self._keys.path}: {stored.name!r} has shape {stored.shape}, not {wanted}; convert the model again."
        )


def _turned(shape: tuple[int, ...], is_turned: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if is_turned else shape


def _cut(stored: GgufTensor, count: int) -> Iterable[GgufTensor]:
    """Parts of equal size, of whole rows."""
    rows, num_bytes = prod(stored.shape[:-1]) // count, stored.num_bytes // count
    for index in range(count):
        name, offset = f"{stored.name}[{index}]", stored.offset + index * num_bytes
        yield replace(stored, name=name, shape=(rows, stored.shape[-1]), offset=offset, num_bytes=num_bytes)


def stems_by_layer(tensors: Mapping[str, GgufTensor]) -> dict[int, set[str]]:
    """Lists what each layer has, such as attn_q."""
    found: dict[int, set[str]] = {}
    for stored in tensors.values():
        if match := re.match(r"blk\.(\d{1,9})\.", stored.name):
            found.setdefault(int(match[1]), set()).add(_stem(stored))
    return found
