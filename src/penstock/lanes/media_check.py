"""Does an image-text model in memory read in chunks what it reads whole? Tried on text, and on a small picture."""

# V vocabulary

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import InvalidMedia, PenstockError, UnsupportedModel
from penstock.lanes.chunk_check import chunk_check, exact_limit
from penstock.lanes.forward_call import read_in_chunks
from penstock.lanes.media import MediaPrompt
from penstock.lanes.multimodal import MultimodalLane
from penstock.lanes.verdicts import Finding, Verdict, Way

WIDTH, HEIGHT = 112, 84
NUM_CHUNKS = 4  # few, because a picture may be many tokens of a large model
NOT_PACKED = Finding(exact=False, max_difference=None, reason="one sequence per call: the model keeps its own cache")


def check_media(lane: MultimodalLane) -> Verdict:
    """A model whose pictures are not read as its plain forward reads them is refused; else whole is always right."""
    text = chunk_check(lane.model)
    found = Finding(exact=text.exact, max_difference=text.max_difference, reason=f"text {text.reason.rstrip('.')}")
    if text.exact and lane.processor is not None:
        found = _check_picture(lane)
    return Verdict(**found.model_dump(), way=Way.OWN_CACHE, packing=NOT_PACKED)


def _check_picture(lane: MultimodalLane) -> Finding:
    try:
        inputs = _picture_inputs(lane)
    except InvalidMedia as error:
        return Finding(
            exact=True, max_difference=None, reason=f"text is; no picture was tried: {str(error).rstrip('.')}"
        )
    try:
        with torch.no_grad():
            plain_V = lane.model(**inputs, use_cache=False).logits[0, -1].float()
            prompt = MediaPrompt.of(lane.media, inputs, encoder_bytes=lane.encoder_bytes)
            whole = _difference(lane, prompt, plain_V, prompt.num_tokens)
            chunked = _difference(lane, prompt, plain_V, -(-prompt.num_tokens // NUM_CHUNKS) + 1)
    except (PenstockError, RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        problem = " ".join(str(error).split())[:200]
        raise UnsupportedModel(f"A prompt with a picture cannot be read by this model ({problem}).") from error
    limit = exact_limit(lane.model, plain_V)
    if not whole <= limit:
        raise UnsupportedModel(
            f"With a picture, this model's logits differ by {whole:.2g} from its plain forward (limit {limit:.2g})."
        )
    reason = f"text and a picture in chunks differ by at most {chunked:.2g} from the whole prompt (limit {limit:.2g})"
    return Finding(exact=chunked <= limit, max_difference=chunked, reason=reason)


def _picture_inputs(lane: MultimodalLane) -> dict[str, Any]:
    from PIL import Image

    assert lane.processor is not None
    if lane.processor.placeholder is None:
        raise InvalidMedia("the processor does not say what stands for an image.")
    pixels = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    text = f"What is in {lane.processor.placeholder} and why?"
    return lane.inputs(lane.processor.inputs(text, [Image.fromarray(pixels.numpy())]))


def _difference(lane: MultimodalLane, prompt: MediaPrompt, plain_V: torch.Tensor, chunk_size: int) -> float:
    output = read_in_chunks(
        lane.model,
        prompt,
        model=lane.model,
        cache=(str(lane.signature.cache_name), None),
        chunk_limit=lambda start: chunk_size,
        num_logit_rows=1,
        takes_logit_rows=lane.signature.accepts("logits_to_keep"),
        on_chunk=lambda start, end, reason: None,
    )
    return float((output.logits[0, -1].float() - plain_V).abs().max())
