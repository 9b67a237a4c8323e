"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.prompt.tokens import Tokenizer
from penstock.request import TokenLogprob
from penstock.server.openai.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> ChatLogprobs:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **named(one.token_id, one.logprob),
                top_logprobs=[TopLogprob(**named(*other)) for other in one.alternatives],
            )
            for one in found
        ]
    )


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
        top_logprobs=[
            None if one is None else {tokenizer.token_text(token): logprob for token, logprob in _likely(one).items()}
            for one in found
        ],
        text_offset=offsets[:-1],
    )


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Lists logprobs by token id, at each place of the prompt."""
    return [
        None
        if one is None
        else {
            str(token): PromptLogprob(logprob=logprob, decoded_token=tokenizer.token_text(token))
            for token, logprob in _likely(one).items()
        }
        for one in found
    ]


def _likely(found: TokenLogprob) -> dict[int, float]:
    """Gives the likeliest tokens, and the one that came if it is not among them."""
    return dict(found.alternatives) | {found.token_id: found.logprob}
