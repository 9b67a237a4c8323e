"""The lane `transformers-generic-multimodal`: any image-text model of transformers, its prompts read in exact chunks.

One sequence per call, with the model's own cache. Images are encoded when their request comes, each once.
"""

# n tokens of the chunk, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.attention.backend import ForwardInputs
from penstock.errors import InvalidMedia, MemoryTooSmall
from penstock.lanes.fixed_rotary import depends_on_length, rotary_fixed_at
from penstock.lanes.lane import LaneFacts
from penstock.lanes.media import MediaModel, MediaPrompt
from penstock.lanes.media_features import PIXELS, split_media
from penstock.lanes.media_processor import MediaProcessor
from penstock.lanes.own_cache import tensor_bytes
from penstock.lanes.packed import one_by_one
from penstock.lanes.signature import WantedRows, read_signature
from penstock.plan.memory import MB, ModelShape

# Tokens of two probes, far enough apart that the difference shows what a token costs.
PROBE_LENGTHS = (16, 48)


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What the lane keeps of a sequence. The answer's tokens stand beside the prompt, to read both again."""

    prompt: MediaPrompt
    written: list[int] = field(default_factory=list)
    cache: Any = None
    num_read: int = 0  # tokens that the cache holds; 0 while a call runs, so that a broken one is not believed


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a prompt with images is held to before they are encoded."""

    refuse_too_long: Callable[[int], None]  # given its number of tokens
    free_bytes: int  # that the encoder may take besides its own


class MultimodalLane:
    """`processor` is None where none could be made; `why_no_images` then says why, and text is still read."""

    def __init__(
        self,
        media: MediaModel,
        *,
        processor: MediaProcessor | None,
        why_no_images: str = "",
        encoder_bytes: int,
        shape: ModelShape,
        facts: LaneFacts,
    ) -> None:
        self.media = media
        self.model = media.model
        self.processor = processor
        self.why_no_images = why_no_images
        self.encoder_bytes = encoder_bytes
        self.shape = shape
        self.facts = facts
        self.signature = read_signature(media.model)
        self._head = WantedRows(media.model, self.signature)
        self._depends_on_length = any(depends_on_length(module) for module in media.model.modules())
        self._kept: dict[int, _Kept] = {}

    # --- prompts ---

    def prompt(
        self, text: str, images: Sequence[Any], limits: PromptLimits, *, add_special_tokens: bool
    ) -> MediaPrompt:
        """The processor runs once, here. What is too long or too large is refused; the images are not encoded yet."""
        if self.processor is None:
            raise InvalidMedia(f"{len(images)} image(s) given, and they cannot be read: {self.why_no_images}")
        inputs = self.inputs(self.processor.inputs(text, images, add_special_tokens=add_special_tokens))
        limits.refuse_too_long(inputs["input_ids"].shape[1])
        self._refuse_too_large(inputs, limits.free_bytes)
        return MediaPrompt.begun(self.media, inputs, encoder_bytes=self.encoder_bytes)

    def text_prompt(self, tokens: Sequence[int]) -> MediaPrompt:
        return MediaPrompt.of(self.media, {"input_ids": torch.tensor([tokens], device=self.model.device)})

    def inputs(self, processed: dict[str, Any]) -> dict[str, Any]:
        """What the forward or the tower takes of a processor's output, where and how the model computes."""
        known = {
            name: torch.as_tensor(value)
            for name, value in processed.items()
            if value is not None and (self.signature.accepts(name) or name in self.media.tower.takes)
        }
        return {
            name: tensor.to(self.model.device, self.model.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in known.items()
        }

    def _refuse_too_large(self, inputs: dict[str, Any], free_bytes: int) -> None:
        if inputs.get(PIXELS) is None:
            return
        allowed = self.encoder_bytes + max(0, free_bytes)
        for number, medium in enumerate(split_media(self.media.tower, inputs), 1):
            needed = self.media.tower.call_bytes([medium])
            if needed > allowed:
                raise MemoryTooSmall(
                    f"Encoding image {number} ({medium.num_patches} patches) takes {needed / MB:,.0f} MB; the memory "
                    f"budget leaves {allowed / MB:,.0f} MB. Scale it down or raise --memory."
                )

    # --- sequences ---

    def expect(self, sequence_id: int, prompt: MediaPrompt) -> None:
        """The prompt of a sequence that will be read from its start."""
        self._kept[sequence_id] = _Kept(prompt=prompt)

    def release(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Float32 logits of the wanted rows, in the order of the step."""
        logits = [
            self._read(
                self._kept[alone.sequence_ids[0]],
                alone.ids_T,
                start=alone.context_lens[0] - len(alone.ids_T),
                rows=alone.logit_rows,
            )
            for alone in one_by_one(inputs)
        ]
        return torch.cat(logits)

    def cache_bytes(self) -> tuple[int, int]:
        """(bytes of a sequence whatever its length, bytes per token) of the model's own cache."""
        sizes = []
        for length in PROBE_LENGTHS:
            kept = _Kept(prompt=self.text_prompt([1] * length))
            with torch.inference_mode():
                self._call(kept, 0, length, torch.zeros(1, dtype=torch.long, device=self.model.device))
            sizes.append(tensor_bytes(kept.cache))
        per_token = max(0, sizes[1] - sizes[0]) // (PROBE_LENGTHS[1] - PROBE_LENGTHS[0])
        return max(0, sizes[0] - per_token * PROBE_LENGTHS[0]), per_token

    def _read(self, kept: _Kept, ids_n: torch.Tensor, *, start: int, rows: torch.Tensor) -> torch.Tensor:
        """Tokens [start, start + n); what is past the prompt was written, and is read again after a preemption."""
        num_prompt = kept.prompt.num_tokens
        end = start + len(ids_n)
        kept.written[max(0, start - num_prompt) :] = ids_n[max(0, num_prompt - start) :].tolist()
        if start == 0 or kept.num_read != start:
            rows, start = rows + start, 0
            kept.cache, kept.num_read = None, 0
        else:
            rows = rows.clone()
        border = min(max(start, num_prompt), end)
        logits = []
        for first, last in ((start, border), (border, end)):
            if first < last:
                is_own = (rows >= first - start) & (rows < last - start)
                logits.append(self._call(kept, first, last, rows[is_own] - (first - start)))
        return torch.cat(logits)

    def _call(self, kept: _Kept, start: int, end: int, rows: torch.Tensor) -> torch.Tensor:
        """Tokens [start, end), either of the prompt or written after it."""
        signature, prompt = self.signature, kept.prompt
        with ExitStack() as stack:
            if start < prompt.num_tokens:
                inputs = prompt.chunk(start, end)
                stack.enter_context(prompt.while_reading())
                if self._depends_on_length:
                    last_token = {"position_ids": prompt.position_ids[..., -1:]}
                    stack.enter_context(rotary_fixed_at(self.model, last_token))
            else:
                inputs = self._written(kept, start, end)
            inputs = {name: value for name, value in inputs.items() if signature.accepts(name)}
            if signature.accepts_use_cache:
                inputs["use_cache"] = True
            assert signature.cache_name is not None, "refused where the model enters"
            if kept.cache is not None:
                inputs[signature.cache_name] = kept.cache
            kept.num_read = 0
            logits, output = self._head.call(rows, **inputs)
        kept.cache = getattr(output, signature.cache_name)
        kept.num_read = end
        return logits

    def _written(self, kept: _Kept, start: int, end: int) -> dict[str, torch.Tensor]:
        first = kept.prompt.num_tokens
        ids = torch.tensor([kept.written[start - first : end - first]], device=self.model.device)
        positions = [kept.prompt.positions_after(number) for number in range(start, end)]
        return {"input_ids": ids, "position_ids": torch.cat(positions, dim=-1)}
