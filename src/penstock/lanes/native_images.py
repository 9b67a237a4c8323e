"""The lane `optimized-native-multimodal`: our decoder over our pages, images encoded by the tower of transformers."""

# T tokens of the step, N rows of media, A position axes

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from penstock.attention.backend import ForwardInputs, MediaInputs
from penstock.errors import UnsupportedModel
from penstock.foreign.features import Features
from penstock.foreign.gguf_images import gguf_processor
from penstock.foreign.images import MediaModel, MediaPrompt
from penstock.foreign.pretrained import image_text_class, load_tower, quiet_library
from penstock.lanes.lane import LaneFacts
from penstock.lanes.loading import LoadedLane, Loading, require_folder, with_boundary
from penstock.lanes.media_intake import ImageReader, MediaIntake
from penstock.lanes.native_text import NativeTextLane, native_lane
from penstock.models.files import ModelFiles
from penstock.models.media_spec import media_decoder_spec, sight_of
from penstock.models.stored_names import DRAFTING, HEAD, SCALES, decoder_prefix, stored_spec
from penstock.models.weights import open_weights
from penstock.plan.machine import return_freed_memory
from penstock.plan.memory import ModelShape
from penstock.plan.waves import Waves
from penstock.request import Span


class NativeMultimodalLane(MediaIntake):
    """`media.model` is the tower alone: what it calls its language model has no layers."""

    def __init__(self, media: MediaModel, decoding: NativeTextLane, *, reader: ImageReader, encoder_bytes: int) -> None:
        super().__init__(media, reader=reader, encoder_bytes=encoder_bytes)
        self.decoding = decoding
        self.facts: LaneFacts = decoding.facts
        self.shape: ModelShape = decoding.shape
        self.capture = decoding.capture
        self.use_products = decoding.use_products
        self._prompts: dict[int, MediaPrompt] = {}

    @property
    def captures_steps(self) -> bool:
        return self.decoding.captures_steps

    @property
    def recorded_bytes(self) -> int:
        return self.decoding.recorded_bytes

    @property
    def waves(self) -> Waves | None:
        return self.decoding.waves

    def begin(self, sequence_id: int, prompt: MediaPrompt) -> None:
        self._prompts[sequence_id] = prompt

    def release(self, sequence_id: int) -> None:
        self._prompts.pop(sequence_id, None)

    @property
    def num_kept(self) -> int:
        return len(self._prompts)

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Float32 logits of the wanted rows, in the order of the step."""
        return self.decoding.run(self._with_media(inputs))

    def _with_media(self, inputs: ForwardInputs) -> ForwardInputs:
        """The step with what its prompts hold beside tokens: features, positions of several axes, spans."""
        inputs = self._with_written_positions(inputs)
        positions_AT, spans, parts = self._axis_positions(inputs), self._spans(inputs), list(self._features(inputs))
        if not parts and not spans and positions_AT is None:
            return inputs
        nothing = Features(rows_ND=torch.empty(0, self.shape.hidden_size, device=inputs.ids_T.device))
        found = Features.joined([features for _, features in parts]) if parts else nothing
        rows_N = torch.cat([inputs.ids_T[:0], *(rows for rows, _ in parts)])
        media = MediaInputs(
            rows_N=rows_N,
            features_ND=found.rows_ND,
            deepstack_LND=found.deepstack_LND,
            positions_AT=positions_AT,
            spans=spans,
        )
        # Placeholders may lie outside the vocabulary; any token does, because features replace it.
        return dataclasses.replace(inputs, ids_T=inputs.ids_T.index_fill(0, rows_N, 0), media=media)

    def _chunks(self, inputs: ForwardInputs) -> Iterator[tuple[MediaPrompt, int, int, int]]:
        """Yields (prompt, first row, first position, end position) of each chunk."""
        for sequence_id, chunk in zip(inputs.sequence_ids, inputs.chunks(), strict=True):
            yield self._prompts[sequence_id], *chunk

    def _features(self, inputs: ForwardInputs) -> Iterator[tuple[torch.Tensor, Features]]:
        """Yields (rows of the step, their features) of each chunk that holds images."""
        for prompt, row, start, end in self._chunks(inputs):
            if prompt.features is None or start >= prompt.num_tokens:
                continue
            rows_N, feature_rows = prompt.media_rows(start, end)
            if len(rows_N):
                deepstack = tuple(layer[feature_rows] for layer in prompt.features.deepstack_LND)
                yield rows_N + row, Features(rows_ND=prompt.features.rows_ND[feature_rows], deepstack_LND=deepstack)

    def _with_written_positions(self, inputs: ForwardInputs) -> ForwardInputs:
        """What is written after an image that took fewer positions than tokens goes on from the last position."""
        shifts = [prompt.rope_delta for prompt, *_ in self._chunks(inputs)]
        if not any(shifts) or not self._is_all_written(inputs):
            return inputs
        counts = torch.tensor(inputs.query_starts).diff()
        shifts_T = torch.tensor(shifts).repeat_interleave(counts).to(inputs.positions_T.device)
        return dataclasses.replace(inputs, positions_T=inputs.positions_T + shifts_T)

    def _axis_positions(self, inputs: ForwardInputs) -> torch.Tensor | None:
        """None where one position says it all: all axes agree on what is written."""
        if self.media.rope_index is None or self._is_all_written(inputs):
            return None
        return torch.cat([prompt.axis_positions(start, end) for prompt, _, start, end in self._chunks(inputs)], dim=1)

    def _is_all_written(self, inputs: ForwardInputs) -> bool:
        return all(start >= prompt.num_tokens for prompt, _, start, _ in self._chunks(inputs))

    def _spans(self, inputs: ForwardInputs) -> tuple[tuple[Span, ...], ...]:
        """Lists the spans of each chunk; nothing at all where no chunk has any."""
        spans = tuple(
            tuple(span for span in prompt.atomic if span.start < end and start < span.end)
            for prompt, _, start, end in self._chunks(inputs)
        )
        return spans if any(spans) else ()


class NativeImagesLoader:
    """The tower is loaded by transformers, all other weights by us."""

    def __init__(self, files: ModelFiles) -> None:
        require_folder(files, "Image-text")
        self.weights = open_weights(files)
        self._refuse_tower_in_eight_bits(files)
        self.spec = stored_spec(media_decoder_spec(files), self.weights, files.folder)
        self.reader = ImageReader.of(files) if files.tower is None else None  # a GGUF's needs the tokenizer
        self.model_class, self.model_config = image_text_class(files)

    def _refuse_tower_in_eight_bits(self, files: ModelFiles) -> None:
        prefix = decoder_prefix(self.weights.names, files.folder)
        scales = (name for name in self.weights.names if name.endswith(SCALES) and not name.endswith(f"{HEAD}{SCALES}"))
        if found := min((name for name in scales if not name.startswith((prefix, DRAFTING))), default=None):
            raise UnsupportedModel(
                f"{files.folder}: {found!r} belongs to the vision tower, which is read in full precision only. "
                "Take a checkpoint whose tower is not quantized, or give --text-only."
            )

    def load(self, loading: Loading) -> LoadedLane:
        files, num_tokens = loading.place.files, loading.num_tokens(loading.memory)
        with quiet_library():
            reader = self.reader or ImageReader(processor=gguf_processor(files, self.model_config, loading.tokenizer))
            tower = load_tower(files, self.model_class, self.model_config, loading.dtype, loading.device)
            sight = sight_of(files.config)
            media, encoder_bytes = reader.media(tower, loading, loading.memory, sight=sight)
        return_freed_memory()
        facts = with_boundary(loading.place.lane, media.sight)
        text = native_lane(self.spec, self.weights, loading, num_tokens, facts)
        return LoadedLane(
            lane=NativeMultimodalLane(media, text, reader=reader, encoder_bytes=encoder_bytes),
            spec=self.spec,
            memory=loading.memory,
            num_tokens=num_tokens,
            attention=text.attention,
            states=text.states,
            chat_template=reader.chat_template,
        )
