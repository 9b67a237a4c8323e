"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.prompt.tokens import Tokenizer
from penstock.request import TokenLogprob
from penstock.server.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_logprob(tokenizer, one) for one in found])


def _chat_logprob(tokenizer: Tokenizer, found: TokenLogprob) -> ChatLogprob:
    chosen = _top(tokenizer, found.token_id, found.logprob)
    others = [_top(tokenizer, token, logprob) for token, logprob in found.alternatives]
    return ChatLogprob(**chosen.model_dump(), top_logprobs=others)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    text = tokenizer.token_text(token_id)
    return TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()))


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: Sequence[TokenLogprob | None], first_offset: int
) -> CompletionLogprobs:
    """`found` has None where nothing came before the token; offsets count characters of the text."""
    texts = [tokenizer.token_text(token) for token in token_ids]
    offsets = [first_offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if one is None else one.logprob for one in found],
        top_logprobs=[None if one is None else _alternatives(tokenizer, one) for one in found],
        text_offset=offsets[:-1],
    )


def _alternatives(tokenizer: Tokenizer, found: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, and the one that came if it is not among them."""
    named = {tokenizer.token_text(token): logprob for token, logprob in found.alternatives}
    return named | {tokenizer.token_text(found.token_id): found.logprob}


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: Sequence[TokenLogprob | None]
) -> PromptLogprobs:
    """By token id, at each place of the prompt."""
    return [None if one is None else _by_id(tokenizer, one) for _, one in zip(token_ids, found, strict=True)]


def _by_id(tokenizer: Tokenizer, found: TokenLogprob) -> dict[str, PromptLogprob]:
    pairs = dict(found.alternatives) | {found.token_id: found.logprob}
    return {
        str(token): PromptLogprob(logprob=logprob, decoded_token=tokenizer.token_text(token))
        for token, logprob in pairs.items()
    }
