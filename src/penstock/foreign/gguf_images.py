"""What makes the inputs of image models in GGUF files, which have no files that describe a processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.foreign.processor import MediaProcessor
from penstock.models.files import ModelFiles

LEAST_ROWS = {"qwen2_5_vl": 4}  # of an image, as published; newer ones have at least 64
MOST_ROWS = 16_384


def gguf_processor(files: ModelFiles, config: Any, tokenizer: Any) -> MediaProcessor:
    """Makes a processor as the library would make it from a folder of the model, without what reads videos."""
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    assert files.tower is not None
    vision = config.vision_config
    usual: dict[str, Any] = dict(files.tower.pixels)
    if config.model_type == "gemma3":
        names = {"image_token": "image_token_id", "boi_token": "boi_token_index", "eoi_token": "eoi_token_index"}
        special = {ours: files.tower.kind.tokens[theirs] for ours, theirs in names.items()}
        side = vision.image_size
        processor: Any = Gemma3Processor(
            image_processor=Gemma3ImageProcessorPil(size={"height": side, "width": side}, **usual),
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special),
            image_seq_length=config.mm_tokens_per_image,
        )
        return MediaProcessor(processor)
    row_pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    least = LEAST_ROWS.get(config.model_type, 64)
    values: dict[str, Any] = {
        "size": {"shortest_edge": least * row_pixels, "longest_edge": MOST_ROWS * row_pixels},
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    images = Qwen2VLImageProcessorPil(**values, **usual)
    return MediaProcessor(GridProcessor(images, tokenizer, files.tower.kind.tokens["image_token_id"]))


class GridProcessor:
    """Puts as many placeholders into a text as the grids of its images have merged patches."""

    def __init__(self, image_processor: Any, tokenizer: Any, image_token: str) -> None:
        self.image_processor, self.tokenizer, self.image_token = image_processor, tokenizer, image_token

    def __call__(
        self,
        text: Sequence[str],
        images: Sequence[Any] = (),
        add_special_tokens: bool = True,
        return_tensors: str = "pt",
    ) -> dict[str, Any]:
        found = dict(self.image_processor(images=list(images), return_tensors=return_tensors)) if images else {}
        first, *others = text[0].split(self.image_token)
        merged = self.image_processor.merge_size**2
        counts = (found["image_grid_thw"].prod(-1) // merged).tolist() if images else []
        expanded = [self.image_token * count + part for count, part in zip(counts, others, strict=True)]
        ids = self.tokenizer.encode("".join([first, *expanded]), add_special_tokens=add_special_tokens).ids
        input_ids = torch.tensor([ids])
        types = (input_ids == self.tokenizer.token_to_id(self.image_token)).long()
        made = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "mm_token_type_ids": types}
        return found | made
