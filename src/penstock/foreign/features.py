"""Media to feature rows: each medium encoded once, in batches within a byte budget, and kept by its content."""

# M media, N feature rows, D hidden size, L deepstack layers

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.errors import InvalidMedia, UnsupportedModel

DEFAULT_ENCODER_BYTES = 256 * 2**20  # working memory of one call of the tower, where no budget is given
DEFAULT_KEPT_BYTES = 256 * 2**20  # features that stay for the next prompt with the same media
PIXELS = "pixel_values"
ROWS_OF_PATCHES = frozenset({"image_position_ids", "spatial_shapes"})  # with these, pixels are patches in rows, padded
# What processors return for images besides pixels, by the names that towers take them under.
TENSORS = ROWS_OF_PATCHES | {PIXELS, "image_grid_thw", "image_sizes", "pixel_attention_mask", "batch_num_images"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a prompt's placeholders become: rows for the embeddings, and for the layers that add more of them."""

    rows_ND: torch.Tensor
    deepstack_LND: tuple[torch.Tensor, ...] = ()
    media: tuple[tuple[bytes, int], ...] = ()  # (key, rows) of each medium; none: they came encoded

    @property
    def num_rows(self) -> int:
        return self.rows_ND.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.rows_ND, *self.deepstack_LND))

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        layers = zip(*(part.deepstack_LND for part in parts), strict=True)
        return cls(
            rows_ND=torch.cat([part.rows_ND for part in parts]),
            deepstack_LND=tuple(torch.cat(layer) for layer in layers),
            media=tuple(medium for part in parts for medium in part.media),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One image, or one tile of it, as the tower takes it; `key` is a hash of its content."""

    inputs: Mapping[str, torch.Tensor]
    num_patches: int
    key: bytes
    is_alone: bool  # the only image of its sample: some models cut only those into tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """How a model encodes images: its `get_image_features`, and which tensors and other settings that takes."""

    encode: Any
    takes: frozenset[str]
    settings: frozenset[str]
    patch_size: int
    bytes_per_patch: int
    bytes_per_patch_squared: int

    def call_bytes(self, media: Sequence[Medium]) -> int:
        return sum(
            medium.num_patches * self.bytes_per_patch + medium.num_patches**2 * self.bytes_per_patch_squared
            for medium in media
        )


class FeatureCache:
    """Features by content; the least recently used leave when there are too many bytes."""

    def __init__(self, max_bytes: int = DEFAULT_KEPT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._by_key: OrderedDict[bytes, Features] = OrderedDict()

    def get(self, key: bytes) -> Features | None:
        if key in self._by_key:
            self._by_key.move_to_end(key)
        return self._by_key.get(key)

    def put(self, key: bytes, features: Features) -> None:
        if (old := self._by_key.pop(key, None)) is not None:
            self.num_bytes -= old.num_bytes
        self._by_key[key] = features
        self.num_bytes += features.num_bytes
        while self.num_bytes > self.max_bytes and self._by_key:
            self.num_bytes -= self._by_key.popitem(last=False)[1].num_bytes


class Encoding:
    """The media of a prompt on their way through the tower, one call at a time; equal media are encoded once."""

    def __init__(
        self,
        tower: Tower,
        inputs: Mapping[str, Any],
        cache: FeatureCache,
        budget_bytes: int = DEFAULT_ENCODER_BYTES,
        scope: str = "",
    ) -> None:
        self._tower = tower
        self._cache = cache
        self.media = split_media(tower, inputs, scope)
        self._settings = {name: inputs[name] for name in tower.settings if inputs.get(name) is not None}
        self._known = {one.key: found for one in self.media if (found := cache.get(one.key)) is not None}
        missing = {one.key: one for one in self.media if one.key not in self._known}
        self._waiting = deque(batches(tower, list(missing.values()), budget_bytes))

    @property
    def is_done(self) -> bool:
        return not self._waiting

    @torch.no_grad()
    def advance(self) -> None:
        """One call of the tower, for what nobody else has encoded meanwhile."""
        batch = [medium for medium in self._waiting[0] if not self._is_known(medium)]
        for medium, features in zip(batch, _encode(self._tower, batch, self._settings) if batch else (), strict=True):
            self._known[medium.key] = replace(features, media=((medium.key, features.num_rows),))
            self._cache.put(medium.key, self._known[medium.key])
        self._waiting.popleft()

    def _is_known(self, medium: Medium) -> bool:
        found = self._cache.get(medium.key)
        if found is not None:
            self._known[medium.key] = found
        return found is not None

    def features(self) -> Features:
        """The rows of all media, in order; what is not encoded yet is encoded now."""
        while not self.is_done:
            self.advance()
        return Features.joined([self._known[medium.key] for medium in self.media])


def given_features(output: Any) -> Features:
    """What a caller encoded before, as the tower returned it."""
    layers = getattr(output, "deepstack_features", None) or ()
    return Features(rows_ND=_flat(output.pooler_output), deepstack_LND=tuple(_flat(layer) for layer in layers))


def batches(tower: Tower, media: Sequence[Medium], budget_bytes: int) -> Iterator[list[Medium]]:
    """Batches as many media per call as the budget allows, at least one; images of unlike shapes do not share one."""
    batch: list[Medium] = []
    for medium in media:
        fits = tower.call_bytes([*batch, medium]) <= budget_bytes
        if batch and not (fits and _can_share(batch[0], medium)):
            yield batch
            batch = []
        batch.append(medium)
    if batch:
        yield batch


def split_media(tower: Tower, inputs: Mapping[str, Any], scope: str = "") -> list[Medium]:
    """The processor's tensors, medium by medium: patches by grid, tiles in a batch, or rows.

    `scope`: part of each key, so that equal media of different scopes are not found.
    """
    given = {name: torch.as_tensor(inputs[name]) for name in tower.takes if inputs.get(name) is not None}
    if PIXELS not in given:
        raise InvalidMedia(f"The processor returned no {PIXELS}; got {', '.join(sorted(inputs)) or 'nothing'}.")
    if "image_grid_thw" in given:
        parts = _by_grid(given)
    elif given[PIXELS].ndim == 5 and "image_sizes" not in tower.takes:
        parts = _by_tile(given)
    else:
        parts = _by_row(given)
    settings = [f"{name}={inputs[name]}" for name in sorted(tower.settings) if inputs.get(name) is not None]
    return [_medium(tower, part, is_alone, " ".join([scope, *settings])) for part, is_alone in parts]


def _by_grid(given: dict[str, torch.Tensor]) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    ends = given["image_grid_thw"].prod(-1).cumsum(0).tolist()
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        grid = given["image_grid_thw"][index : index + 1]
        yield {PIXELS: given[PIXELS][start:end], "image_grid_thw": grid}, True


def _by_tile(given: dict[str, torch.Tensor]) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """[samples, tiles, ...]; tiles that are all zero are padding."""
    flat = {name: tensor.flatten(0, 1) for name, tensor in given.items()}
    for index, pixels in enumerate(flat[PIXELS]):
        if bool(pixels.any()):
            yield {name: tensor[index : index + 1] for name, tensor in flat.items()}, True


def _by_row(given: dict[str, torch.Tensor]) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    per_sample = given.pop("batch_num_images", None)
    num_media = given[PIXELS].shape[0]
    alone = [True] * num_media
    if per_sample is not None:
        alone = [bool(number == 1) for number in per_sample.tolist() for _ in range(number)]
    for index in range(num_media):
        yield {name: tensor[index : index + 1] for name, tensor in given.items()}, alone[index]


def _medium(tower: Tower, inputs: dict[str, torch.Tensor], is_alone: bool, settings: str) -> Medium:
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {is_alone}".encode())
        digest.update(tensor.view(torch.uint8).numpy())
    pixels = inputs[PIXELS]
    num_patches = pixels.shape[-2] if inputs.keys() & ROWS_OF_PATCHES else pixels.shape[0]
    if not inputs.keys() & {"image_grid_thw", *ROWS_OF_PATCHES}:
        num_patches = pixels[..., 0, :, :].numel() // tower.patch_size**2
    return Medium(inputs=inputs, num_patches=num_patches, key=digest.digest(), is_alone=is_alone)


def _can_share(one: Medium, other: Medium) -> bool:
    return one.is_alone == other.is_alone and one.inputs[PIXELS].shape[1:] == other.inputs[PIXELS].shape[1:]


def _encode(tower: Tower, media: Sequence[Medium], settings: Mapping[str, Any]) -> list[Features]:
    joined = {name: torch.cat([medium.inputs[name] for medium in media]) for name in media[0].inputs}
    if "batch_num_images" in tower.takes and not media[0].is_alone:
        joined["batch_num_images"] = torch.tensor([max(2, len(media))])  # not 1: none of them is alone
    if joined[PIXELS].ndim == 4 and "pixel_attention_mask" in tower.takes:
        joined = {name: tensor[None] for name, tensor in joined.items()}
    output = tower.encode(**joined, **settings, return_dict=True)
    rows = _per_medium(output.pooler_output, len(media))
    layers = [_per_medium(layer, len(media)) for layer in getattr(output, "deepstack_features", None) or ()]
    return [
        Features(rows_ND=rows[index].clone(), deepstack_LND=tuple(layer[index].clone() for layer in layers))
        for index in range(len(media))
    ]


def _per_medium(features: Any, num_media: int) -> list[torch.Tensor]:
    """A tensor of all media, a list with one for each, or a list with one for the whole call."""
    if isinstance(features, (list, tuple)) and len(features) == num_media:
        return [one.flatten(0, -2) for one in features]
    rows_ND = _flat(features)
    if rows_ND.shape[0] % num_media:
        raise UnsupportedModel(
            f"The tower gave {rows_ND.shape[0]} rows for {num_media} images, which cannot be told apart."
        )
    return list(rows_ND.chunk(num_media))


def _flat(features: Any) -> torch.Tensor:
    parts = features if isinstance(features, (list, tuple)) else [features]
    return torch.cat([part.flatten(0, -2) for part in parts])
