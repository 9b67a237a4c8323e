"""The self-check of image-text models: text on a small copy; a small picture among text on the loaded model."""

# V vocabulary

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import InvalidMedia, UnsupportedModel, first_line
from penstock.foreign.features import FeatureCache
from penstock.foreign.forward import CachedForward
from penstock.foreign.images import MediaModel, MediaPrompt, media_model
from penstock.foreign.own_cache import PagedPrompts
from penstock.foreign.pages import CannotJoin, attention_calls, pages_of, set_attention, use_paged_attention
from penstock.proof.comparison import Case, compared, held_to_float32, largest_difference, spans
from penstock.proof.forward import forward_case, text_inputs
from penstock.proof.text import BLOCK_SIZE, CHUNKINGS, PROMPT_LENGTHS, MakeAttention, cpu_attention, step_inputs
from penstock.proof.verdict import Finding, Verdict, Way

if TYPE_CHECKING:
    from penstock.lanes.generic_images import MultimodalLane

WIDTH, HEIGHT = 112, 84
NUM_CHUNKS = 4  # few, because a picture may be many tokens of a large model
NOT_PACKED = Finding.unmeasured("one sequence per call: the model keeps its own cache")


@torch.no_grad()
def check_image_text(model: Any, make_attention: MakeAttention = cpu_attention) -> Verdict:
    """Checks text on a small copy in float32, cut as the lane cuts it. Pictures need the real model's processor."""
    media = media_model(model)
    if media is None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no get_image_features; its images cannot be read in chunks."
        )
    texts = [text_inputs(media.model, length, seed=seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    prompts = [MediaPrompt.of(media, {"input_ids": inputs["input_ids"]}) for inputs in texts]
    cases = [forward_case(media.model, *both) for both in zip(texts, prompts, strict=True)]
    what, against = "chunked logits of text", "the whole prompt's"
    if media.sight == "causal":
        try:
            with paged(cases, prompts, media, make_attention) as in_pages:
                found = compared(in_pages, CHUNKINGS, what=what, against=against)
        except CannotJoin as error:
            found = Finding.unmeasured(str(error))
        if found.exact:
            return Verdict(way=Way.PAGED, packing=NOT_PACKED, **found.model_dump())
    found = compared(cases, CHUNKINGS, what=what, against=against)
    return Verdict(way=Way.OWN_CACHE, packing=NOT_PACKED, **found.model_dump())


@contextmanager
def paged(
    cases: list[Case], prompts: list[MediaPrompt], media: MediaModel, make_attention: MakeAttention
) -> Generator[list[Case]]:
    """Reads the same cases over pages while this lasts."""
    model, forward = media.model, CachedForward(media.model)
    own_attention = model.config.get_text_config()._attn_implementation
    if forward.depends_on_length:
        raise CannotJoin("its rotary table depends on the prompt's length")
    try:
        use_paged_attention(model)
        calls = attention_calls(model, forward.signature)
        num_tokens = max(*PROMPT_LENGTHS, *(prompt.num_tokens for prompt in prompts))
        storage = pages_of(model, calls, -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE)
        ways = PagedPrompts(forward, make_attention(storage, BLOCK_SIZE, calls[0].num_heads), len(calls))

        def read(case: Case, prompt: MediaPrompt, sizes: Iterator[int]) -> torch.Tensor:
            ways.expect(0, prompt)
            tokens, logits = list(prompt.positions), []
            for start, end in spans(len(tokens), sizes):
                first = min(max(start, len(tokens) - len(case.whole)), end)
                rows = torch.arange(first - start, end - start, device=model.device)
                step = step_inputs([tokens], [(start, end)], model.device)
                logits.append(ways.run(dataclasses.replace(step, logit_rows=rows)))
            return torch.cat(logits)

        yield [
            dataclasses.replace(case, read=partial(read, case, prompt))
            for case, prompt in zip(cases, prompts, strict=True)
        ]
    finally:
        set_attention(model, own_attention)


@torch.no_grad()
def check_picture(lane: MultimodalLane, make_attention: MakeAttention | None = None) -> Finding | None:
    """Checks a picture on the loaded model, which is refused where its plain forward reads the picture differently.

    None: there is no processor, or it does not say what stands for an image, so none could be tried.
    `make_attention`: makes that of the pages over which chunks are read; None: they are read with the model's cache.
    """
    inputs = _picture_inputs(lane)
    if inputs is None:
        return None
    used = lane.model.config.get_text_config()._attn_implementation
    set_attention(lane.model, lane.own_attention)
    try:
        return _checked_picture(lane, inputs, make_attention)
    finally:
        set_attention(lane.model, used)


def _checked_picture(lane: MultimodalLane, inputs: dict[str, Any], make_attention: MakeAttention | None) -> Finding:
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
    what, against = "a picture's logits in chunks", "the whole prompt's"
    if make_attention is None:
        return compared([case], [sizes], what=what, against=against)
    with paged([case], [prompt], lane.media, make_attention) as in_pages:
        return compared(in_pages, [sizes], what=what, against=against)


@torch.no_grad()
def check_real_media(lane: MultimodalLane, make_attention: MakeAttention | None = None) -> Finding:
    """The loaded weights in their own dtype: two texts, and a picture where one can be made. A float32 copy exists
    meanwhile."""
    exact = copy.deepcopy(lane.model).float()
    media = dataclasses.replace(lane.media, features=FeatureCache(0))
    picture = _picture_inputs(lane)
    texts = [text_inputs(lane.model, length, seed=seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    cases, exact_TVs, prompts = [], [], []
    for inputs in texts if picture is None else [*texts[1:], picture]:
        prompt = MediaPrompt.of(media, inputs, encoder_bytes=lane.encoder_bytes)
        first_row = prompt.num_tokens - 1 if inputs is picture else 0
        wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        exact_TVs.append(exact(**wide, use_cache=True, return_dict=True).logits[0, first_row:].float())
        cases.append(forward_case(lane.model, inputs, prompt, first_row=first_row))
        prompts.append(prompt)
    with nullcontext(cases) if make_attention is None else paged(cases, prompts, media, make_attention) as ways:
        return held_to_float32(zip(ways, exact_TVs, strict=True), CHUNKINGS[0], lane.model.dtype)


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
