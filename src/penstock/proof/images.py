"""The self-check of image-text models: text on a small copy; a small picture among text on the loaded model."""

# V vocabulary

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import InvalidMedia, UnsupportedModel, first_line
from penstock.foreign.features import FeatureCache
from penstock.foreign.images import MediaModel, MediaPrompt, media_model
from penstock.proof.comparison import Case, compared, held_to_float32, largest_difference
from penstock.proof.forward import forward_case, text_inputs
from penstock.proof.text import CHUNKINGS, PROMPT_LENGTHS
from penstock.proof.verdict import Finding, Verdict, Way

if TYPE_CHECKING:
    from penstock.lanes.generic_images import MultimodalLane

WIDTH, HEIGHT = 112, 84
NUM_CHUNKS = 4  # few, because a picture may be many tokens of a large model
NOT_PACKED = Finding.unmeasured("one sequence per call: the model keeps its own cache")


@torch.no_grad()
def check_image_text(model: Any) -> Verdict:
    """Checks text on a small copy in float32, cut as the lane cuts it. Pictures need the real model's processor."""
    media = media_model(model)
    if media is None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no get_image_features; its images cannot be read in chunks."
        )
    found = compared(_texts(media), CHUNKINGS, what="chunked logits of text", against="the whole prompt's")
    return Verdict(way=Way.OWN_CACHE, packing=NOT_PACKED, **found.model_dump())


def _texts(media: MediaModel) -> Iterator[Case]:
    for seed, length in enumerate(PROMPT_LENGTHS):
        inputs = text_inputs(media.model, length, seed=seed)
        prompt = MediaPrompt.of(media, {"input_ids": inputs["input_ids"]})
        yield forward_case(media.model, inputs, prompt)


@torch.no_grad()
def check_picture(lane: MultimodalLane) -> Finding | None:
    """Checks a picture on the loaded model, which is refused where its plain forward reads the picture differently.

    None: there is no processor, or it does not say what stands for an image, so none could be tried.
    """
    inputs = _picture_inputs(lane)
    if inputs is None:
        return None
    try:
        prompt = MediaPrompt.of(lane.media, inputs, encoder_bytes=lane.encoder_bytes)
        case = forward_case(lane.model, inputs, prompt, first_row=prompt.num_tokens - 1)
        whole = largest_difference(case.read(iter([prompt.num_tokens])), case.whole)
    except Exception as error:  # a foreign forward or processor fails in ways of its own
        raise UnsupportedModel(
            f"A prompt with a picture cannot be read by this model ({first_line(error)})."
        ) from error
    if not whole <= case.allowed:
        raise UnsupportedModel(
            f"With a picture, this model's logits differ by {whole:.2g} from its plain forward ({case.allowed:.2g} is "
            "allowed)."
        )
    sizes = (-(-prompt.num_tokens // NUM_CHUNKS) + 1,)
    return compared([case], [sizes], what="a picture's logits in chunks", against="the whole prompt's")


@torch.no_grad()
def check_real_media(lane: MultimodalLane) -> Finding:
    """The loaded weights in their own dtype: two texts, and a picture where one can be made. A float32 copy exists
    meanwhile."""
    exact = copy.deepcopy(lane.model).float()
    media = dataclasses.replace(lane.media, features=FeatureCache(0))
    picture = _picture_inputs(lane)
    texts = [text_inputs(lane.model, length, seed=seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    cases = []
    for inputs in texts if picture is None else [*texts[1:], picture]:
        prompt = MediaPrompt.of(media, inputs, encoder_bytes=lane.encoder_bytes)
        first_row = prompt.num_tokens - 1 if inputs is picture else 0
        wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        exact_TV = exact(**wide, use_cache=True, return_dict=True).logits[0, first_row:].float()
        cases.append((forward_case(lane.model, inputs, prompt, first_row=first_row), exact_TV))
    return held_to_float32(cases, CHUNKINGS[0], lane.model.dtype)


def _picture_inputs(lane: MultimodalLane) -> dict[str, Any] | None:
    if lane.processor is None or lane.processor.placeholder is None:
        return None
    try:
        from PIL import Image

        pixels = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(0))
        picture = Image.fromarray(pixels.to(torch.uint8).numpy())
        return lane.inputs(lane.processor.inputs(f"What is in {lane.processor.placeholder} and why?", [picture]))
    except (ImportError, InvalidMedia):
        return None
