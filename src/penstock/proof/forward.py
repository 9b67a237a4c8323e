"""The self-check of a forward that is cut into chunks, as `attach` and the multimodal lane cut it."""

# T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.foreign.forward import Cached, CachedForward, ForwardPrompt, TextCall, read_in_chunks
from penstock.foreign.signature import ForwardSignature
from penstock.proof.comparison import Case, compared, exact_limit
from penstock.proof.verdict import Finding

NUM_TOKENS = 24  # few: each chunk is a call of a model that may be large
CHUNK_SIZES = (7, 3, 1)
NUM_PROMPTS = 3


@torch.no_grad()
def check_forward(
    model: Any, *, chunk_sizes: tuple[int, ...] = CHUNK_SIZES, num_padding: int = 0, keeps_padding: bool = False
) -> Finding:
    """Text through the model in memory, in its own dtype; the first `num_padding` tokens are masked, beside a row
    without padding: some classes look at masks of batches alone. `keeps_padding`: the first chunk holds them all."""
    was_training = model.training
    model.eval()
    try:
        return compared(
            _text_cases(model, num_padding, keeps_padding),
            [(size,) for size in chunk_sizes],
            what="chunked logits",
            against="the whole prompt's",
            first_may_decide=True,
        )
    finally:
        model.train(was_training)


def _text_cases(model: Any, num_padding: int, keeps_padding: bool) -> Iterator[Case]:
    for seed in range(NUM_PROMPTS):
        inputs = text_inputs(model, NUM_TOKENS, seed=seed, num_padding=num_padding)
        call = TextCall.of(inputs)
        if keeps_padding:
            call = call.with_first_whole(num_padding)
        yield forward_case(model, inputs, call, first_row=num_padding)


def forward_case(model: Any, inputs: dict[str, Any], prompt: ForwardPrompt, *, first_row: int = 0) -> Case:
    """All rows from `first_row` on, of the plain forward over the inputs and of the prompt in chunks."""
    num_rows = prompt.num_tokens - first_row
    forward = CachedForward(model)
    whole_TV = forward.call({**inputs, "return_dict": True}, Cached()).logits[0, first_row:].float()

    def read(sizes: Iterator[int]) -> torch.Tensor:
        output = read_in_chunks(
            forward,
            prompt,
            Cached(),
            chunk_limit=lambda start: next(sizes),
            num_logit_rows=1 if num_rows == 1 else None,
        )
        return output.logits[0, -num_rows:].float()

    return Case(whole=whole_TV, read=read, allowed=exact_limit(whole_TV, model.dtype))


def text_inputs(model: Any, num_tokens: int, *, seed: int, num_padding: int = 0) -> dict[str, torch.Tensor]:
    vocabulary = model.config.get_text_config().vocab_size
    inputs = {"input_ids": ordinary_tokens(model, vocabulary, num_tokens, seed=seed)}
    if num_padding:
        inputs["input_ids"] = inputs["input_ids"].expand(2, -1)
    places = torch.arange(num_tokens, device=model.device)[None]
    positions = torch.cat([places - num_padding, places]) if num_padding else places
    if num_padding:
        inputs["attention_mask"] = (positions >= 0).long()
    if ForwardSignature.of(model.forward).accepts("position_ids"):
        inputs["position_ids"] = positions.clamp(min=0)
    return inputs


def ordinary_tokens(model: Any, vocabulary: int, num_tokens: int, *, seed: int) -> torch.Tensor:
    """[1, T] random tokens, no padding and no placeholders of media."""
    ids_1T = torch.randint(3, vocabulary, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    for name in ("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "pad_token_id"):
        if isinstance(special := getattr(model.config, name, None), int):
            ids_1T[ids_1T == special] = (special + 1) % vocabulary
    return ids_1T.to(model.device)
