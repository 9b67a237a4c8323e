"""Image-text models: what a model offers, read once, and a prompt with images whose forward can be cut."""

# B batch, T tokens, N feature rows, D hidden size, A position axes, V vocabulary

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from penstock.errors import InvalidMedia, UnsupportedModel
from penstock.foreign.features import (
    DEFAULT_ENCODER_BYTES,
    PIXELS,
    TENSORS,
    Encoding,
    FeatureCache,
    Features,
    Tower,
    given_features,
)
from penstock.foreign.forward import TYPE_NAMES, TextCall, num_cached_tokens
from penstock.foreign.signature import CACHE_NAMES, ForwardSignature
from penstock.plan.chunks import Span, merge_spans
from penstock.request import MediaKey

# What media are allowed to see: only what comes before, their whole span, or (with the text) the whole prompt.
Sight = Literal["causal", "span", "prompt"]
OTHER_MEDIA = ("pixel_values_videos", "input_features", "input_values", "audio_values")
NOT_HANDED_ON = ("input_ids", "mm_encoder_outputs", "labels")
IMAGE_TYPE = 1
SEES_AHEAD = 1e-3  # of the largest logit: more than rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaModel:
    """An image-text model of transformers, probed where it enters."""

    model: Any
    tower: Tower
    image_token_id: int
    sight: Sight
    type_names: tuple[str, ...]  # which of TYPE_NAMES its forward takes
    language_model: torch.nn.Module
    takes_deepstack: bool
    rope_index: Any | None  # None: one position per token
    features: FeatureCache = field(default_factory=FeatureCache)


def media_model(model: Any, sight: Sight | None = None) -> MediaModel | None:
    """None for a text model. A model with a tower that does not follow the library's conventions is refused.

    `sight`: where it is known; else it is tried on the model.
    """
    base = next((one for one in (model.base_model, model) if hasattr(one, "get_image_features")), None)
    vision = getattr(model.config, "vision_config", None)
    if base is None or vision is None:
        return None
    forward = ForwardSignature.of(model.forward)
    image_token_id = _image_token_id(model.config)
    if image_token_id is None or not forward.accepts("inputs_embeds"):
        raise UnsupportedModel(
            f"{type(model).__name__} has images but no image_token_id or no inputs_embeds; its prompts cannot be cut."
        )
    language_model = _language_model(base)
    types = tuple(name for name in TYPE_NAMES if forward.accepts(name))
    return MediaModel(
        model=model,
        tower=_tower(model, base, vision),
        image_token_id=image_token_id,
        sight=sight or _sight(model, types),
        type_names=types,
        language_model=language_model,
        takes_deepstack=ForwardSignature.of(language_model.forward).accepts("deepstack_visual_embeds"),
        rope_index=getattr(base, "get_rope_index", None),
    )


class MediaPrompt:
    """The processor's output for one prompt (or a batch), ready to be read [start, end) by [start, end)."""

    source: None = None  # the decoder itself reads it

    def __init__(
        self,
        media: MediaModel,
        inputs: Mapping[str, Any],
        *,
        features: Features | None = None,
        encoding: Encoding | None = None,
        num_copies: int = 1,
    ) -> None:
        """`features` of images that came encoded, or the `encoding` that makes them. `num_copies`: consecutive rows
        of the batch that share their images, as the beams of a search do."""
        self.media = media
        self.features = features
        self.encoding = encoding  # None: there is nothing to encode, or it is done
        self.input_ids = torch.as_tensor(inputs["input_ids"])
        self.num_tokens = self.input_ids.shape[1]
        self._is_medium_BT = self.input_ids == media.image_token_id
        self._row_BT = _feature_rows(self._is_medium_BT, num_copies)
        self._num_copies = num_copies
        if encoding is None:
            self._require_as_many_rows()
        types = _token_types(media, inputs, self._is_medium_BT)
        self.atomic = _atomic_spans(media.sight, types.get(media.type_names[0]) if media.type_names else None)
        self.position_ids, self.rope_deltas = _positions(media, inputs, self.input_ids)
        self.rope_delta = 0 if self.rope_deltas is None else int(self.rope_deltas.flatten()[0])  # of the first row
        self._types = types
        self._num_past = num_cached_tokens(inputs)
        dropped = {*CACHE_NAMES, *TYPE_NAMES, *NOT_HANDED_ON, *media.tower.takes, *media.tower.settings}
        rest = {name: value for name, value in inputs.items() if name not in dropped}
        self._rest = TextCall(inputs=rest | {"position_ids": self.position_ids}, num_tokens=self.num_tokens)
        self._deepstack: dict[str, Any] | None = None  # of the chunk that runs now

    @classmethod
    def of(
        cls,
        media: MediaModel,
        inputs: Mapping[str, Any],
        *,
        encoder_bytes: int = DEFAULT_ENCODER_BYTES,
        num_copies: int = 1,
    ) -> MediaPrompt:
        """Makes a prompt of what the processor returned; its images are encoded here, unless they come encoded."""
        prompt = cls.begun(media, inputs, encoder_bytes=encoder_bytes, num_copies=num_copies)
        while prompt.encoding is not None:
            prompt.encode_next()
        return prompt

    @classmethod
    def begun(
        cls, media: MediaModel, inputs: Mapping[str, Any], *, encoder_bytes: int, num_copies: int = 1, scope: str = ""
    ) -> MediaPrompt:
        """Begins a prompt before its images are encoded: call `encode_next` until there is no `encoding` any more."""
        _refuse_other_media(inputs)
        encoded = inputs.get("mm_encoder_outputs") or {}
        if encoded.get("image") is not None:
            return cls(media, inputs, features=given_features(encoded["image"]), num_copies=num_copies)
        if inputs.get(PIXELS) is None:
            return cls(media, inputs, num_copies=num_copies)
        encoding = Encoding(media.tower, inputs, media.features, encoder_bytes, scope)
        return cls(media, inputs, encoding=encoding, num_copies=num_copies)

    def encode_next(self) -> None:
        """One call of the tower, or none where all images are known; after the last, the prompt can be read."""
        assert self.encoding is not None
        if not self.encoding.is_done:
            self.encoding.advance()
        if self.encoding.is_done:
            self.features, self.encoding = self.encoding.features(), None
            self._require_as_many_rows()

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        is_medium_BT = self._is_medium_BT[:, start:end]
        rows = self._row_BT[:, start:end][is_medium_BT]
        inputs = self._rest.chunk(start, end) | {"inputs_embeds": self._embeddings(start, end, is_medium_BT, rows)}
        for name, types_BT in self._types.items():
            inputs[name] = self._cut_types(types_BT, start, end)
        self._deepstack = self._deepstack_of(is_medium_BT, rows)
        return inputs

    def media_rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds (which of the tokens [start, end) are an image's, the feature row of each) of a single prompt."""
        rows_N = self._is_medium_BT[0, start:end].nonzero()[:, 0]
        return rows_N, self._row_BT[0, start:end][rows_N]

    def axis_positions(self, start: int, end: int) -> torch.Tensor:
        """[A, n]: of tokens [start, end), of a single prompt and of what is written after it."""
        position_ids = self.position_ids[:, 0]
        border = min(max(start, self.num_tokens), end)
        after = torch.arange(border, end, device=position_ids.device) + self.rope_delta
        return torch.cat([position_ids[:, start:border], after.expand(position_ids.shape[0], -1)], dim=1)

    @property
    def positions(self) -> tuple[int, ...]:
        """The token ids of a single prompt."""
        return tuple(self.input_ids[0].tolist())

    @property
    def is_encoding(self) -> bool:
        return self.encoding is not None

    @property
    def why_no_logprobs(self) -> str:
        has_images = self.features is not None or self.encoding is not None
        return "The tokens of an image have no log-probabilities. Leave prompt_logprobs out." if has_images else ""

    @property
    def keys(self) -> tuple[MediaKey, ...]:
        """Which tokens depend on which image: its own, and where images see themselves, all of their span."""
        if self.features is None:
            return ()
        places = self._is_medium_BT[0].nonzero()[:, 0].tolist()
        found: list[MediaKey] = []
        row = 0
        for key, num_rows in self.features.media:
            start, end = places[row], places[row + num_rows - 1] + 1
            around = [span for span in self.atomic if span.start < end and start < span.end]
            start = min([start, *(span.start for span in around)])
            end = max([end, *(span.end for span in around)])
            found.append(MediaKey(start=start, end=end, key=key))
            row += num_rows
        return tuple(found)

    def positions_after(self, num_computed: int, num_written: int = 1) -> torch.Tensor:
        """The positions of tokens that are written after so many: [B, n], or [A, B, n] with several axes."""
        batch = self.input_ids.shape[0]
        written_n = torch.arange(num_computed, num_computed + num_written, device=self.input_ids.device)
        if self.rope_deltas is None:
            return written_n.expand(batch, -1)
        return (written_n + self.rope_deltas).expand(self.position_ids.shape[0], batch, -1)

    def while_reading(self) -> AbstractContextManager[object]:
        return self._with_deepstack() if self.media.takes_deepstack else nullcontext()

    def _embeddings(self, start: int, end: int, is_medium_BT: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Placeholders may lie outside the vocabulary; any token does, because features replace it."""
        embed = self.media.model.get_input_embeddings()
        ids = self.input_ids[:, start:end].masked_fill(is_medium_BT, 0)
        embeddings_BTD = embed(ids.to(embed.weight.device))
        if self.features is not None and len(rows):
            features_ND = self.features.rows_ND[rows.to(self.features.rows_ND.device)]
            embeddings_BTD = embeddings_BTD.clone()
            embeddings_BTD[is_medium_BT] = features_ND.to(embeddings_BTD)
        return embeddings_BTD

    def _cut_types(self, types_BT: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Masks look types up by position in the whole context, so that what comes before is given too."""
        if self.media.sight == "causal":
            return types_BT[:, start:end]
        return torch.nn.functional.pad(types_BT[:, :end], (self._num_past, 0))

    def _deepstack_of(self, is_medium_BT: torch.Tensor, rows: torch.Tensor) -> dict[str, Any]:
        if self.features is None or not self.features.deepstack_LND or not len(rows):
            return {"visual_pos_masks": None, "deepstack_visual_embeds": None}
        layers = [layer_ND[rows.to(layer_ND.device)] for layer_ND in self.features.deepstack_LND]
        return {"visual_pos_masks": is_medium_BT, "deepstack_visual_embeds": layers}

    @contextmanager
    def _with_deepstack(self) -> Generator[None]:
        """A forward over embeddings does not know where images were; the language model is told behind it."""

        def tell(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, kwargs | (self._deepstack or {})

        handle = self.media.language_model.register_forward_pre_hook(tell, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _require_as_many_rows(self) -> None:
        placeholders = int(self._is_medium_BT.sum()) // self._num_copies
        rows = self.features.num_rows if self.features is not None else 0
        if placeholders != rows:
            what = "more images than placeholders" if rows > placeholders else "more placeholders than images"
            raise InvalidMedia(
                f"The prompt has {placeholders} image placeholder tokens and its images have {rows} features: {what}. "
                f"Give one image for each placeholder."
            )


def _feature_rows(is_medium_BT: torch.Tensor, num_copies: int) -> torch.Tensor:
    """Which feature row each placeholder takes; copies of a prompt take the same ones."""
    own_BT = is_medium_BT[::num_copies]
    rows_BT = (own_BT.flatten().cumsum(0) - 1).view_as(own_BT)
    return rows_BT.repeat_interleave(num_copies, dim=0)


def _tower(model: Any, base: Any, vision: Any) -> Tower:
    parameters = ForwardSignature.of(base.get_image_features).names - {"self"}
    hidden = getattr(vision, "hidden_size", None) or getattr(vision, "embed_dim", 1024)
    layers = getattr(vision, "num_hidden_layers", None) or getattr(vision, "depth", 24)
    heads = getattr(vision, "num_attention_heads", None) or getattr(vision, "num_heads", 16)
    inner = getattr(vision, "intermediate_size", None) or 4 * hidden
    size = model.dtype.itemsize
    patch = getattr(vision, "patch_size", 14)
    is_eager = getattr(vision, "_attn_implementation", None) == "eager"
    return Tower(
        encode=base.get_image_features,
        takes=parameters & TENSORS,
        settings=parameters - TENSORS,
        patch_size=patch[0] if isinstance(patch, (list, tuple)) else patch,
        bytes_per_patch=(hidden * (layers + 8) + 2 * inner) * size,  # some models keep the states of every layer
        bytes_per_patch_squared=heads * (4 + 2 * size) if is_eager else 1 + size,
    )


def _image_token_id(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _language_model(base: Any) -> torch.nn.Module:
    names = ("language_model", "text_model")
    found = next((module for name in names if isinstance(module := getattr(base, name, None), torch.nn.Module)), None)
    if found is None:
        raise UnsupportedModel(f"{type(base).__name__} has neither a language_model nor a text_model.")
    return found


@torch.no_grad()
def _sight(model: Any, type_names: tuple[str, ...]) -> Sight:
    """Tried: is the first token's output moved by a later one, as text, and as an image of two tokens?"""
    if _first_sees_last(model, type_names, image_type=0):
        return "prompt"
    return "span" if type_names and _first_sees_last(model, type_names, image_type=IMAGE_TYPE) else "causal"


def _first_sees_last(model: Any, type_names: tuple[str, ...], *, image_type: int) -> bool:
    embed = model.get_input_embeddings()
    ids_BT = torch.tensor([[1, 2, 3], [1, 2, 4]], device=embed.weight.device)
    types_BT = torch.full_like(ids_BT, image_type)
    inputs = {
        "inputs_embeds": embed(ids_BT),
        "position_ids": torch.arange(3, device=ids_BT.device).expand(ids_BT.shape),
        "use_cache": False,
        **dict.fromkeys(type_names, types_BT),
    }
    one_V, other_V = model(**inputs).logits[:, 0].float()
    return float((one_V - other_V).abs().max()) > SEES_AHEAD * float(one_V.abs().max())


def _token_types(media: MediaModel, inputs: Mapping[str, Any], is_medium_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Takes token types as the processor gave them; where it gave none and spans see themselves, by placeholders."""
    given = {name: inputs[name] for name in media.type_names if inputs.get(name) is not None}
    if not given and media.sight != "causal":
        given = {media.type_names[0]: is_medium_BT.long()}
    return {name: torch.as_tensor(types_BT) for name, types_BT in given.items()}


def _atomic_spans(sight: Sight, types_BT: torch.Tensor | None) -> tuple[Span, ...]:
    if sight == "causal" or types_BT is None:
        return ()
    if sight == "prompt":
        return (Span(start=0, end=types_BT.shape[1]),)
    return merge_spans(span for types_T in types_BT for span in _runs(types_T))


def _runs(types_T: torch.Tensor) -> list[Span]:
    """Unbroken runs of image tokens."""
    is_image = torch.nn.functional.pad((types_T == IMAGE_TYPE).long(), (1, 1))
    edges = is_image.diff()
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return [Span(start=start, end=end) for start, end in zip(starts, ends, strict=True)]


def _positions(
    media: MediaModel, inputs: Mapping[str, Any], input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Finds the positions of the whole prompt: as given, by the model's own rule for several axes, or counted."""
    if inputs.get("position_ids") is not None:
        return inputs["position_ids"], None
    if media.rope_index is not None:
        takes = ForwardSignature.of(media.rope_index).names
        types = inputs.get("mm_token_type_ids")
        if types is None:
            types = (input_ids == media.image_token_id).int() * IMAGE_TYPE
        known = {**inputs, "mm_token_type_ids": types}
        given = {name: known[name] for name in takes if known.get(name) is not None and name != "input_ids"}
        return media.rope_index(input_ids, **given)
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape:
        return (mask.long().cumsum(-1) - 1).clamp(min=0), None
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape), None


def _refuse_other_media(inputs: Mapping[str, Any]) -> None:
    encoded = inputs.get("mm_encoder_outputs") or {}
    for name in OTHER_MEDIA:
        if inputs.get(name) is not None or (name in OTHER_MEDIA[:1] and encoded.get("video") is not None):
            raise InvalidMedia(f"The prompt has {name}; only images are read in chunks. Leave the video or sound out.")
