"""Tokens and costs without running anything: `/tokenize`, `/detokenize`, `/plan`, `/reset_prefix_cache`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from penstock.engine.engine import Engine
from penstock.errors import InvalidPrompt, PromptTooLong
from penstock.plan.prompt_plan import PromptPlan
from penstock.server.openai.asks import FIRST_MISTAKE, Ask, ChunkSize, TokenId
from penstock.server.openai.chat_asks import GivenMessage, Messages
from penstock.server.service import Service

router = APIRouter()
MAX_PLANNED_CONTEXTS = 4  # a plan is walked chunk by chunk; what is longer than this cannot fit anyway


class TextAsk(Ask):
    """A text, or messages, of which the template makes one."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class TokensAsk(Ask):
    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST_MISTAKE]


class Text(BaseModel):
    prompt: str


class PlanAsk(Ask):
    """A text, messages, token ids, or only how many tokens there would be."""

    model: str | None = None
    prompt: str | Annotated[list[TokenId], FIRST_MISTAKE] | None = None
    messages: Messages | None = None
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    chunk_size: ChunkSize = None

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        if sum(given is not None for given in (self.prompt, self.messages, self.prompt_tokens)) != 1:
            raise ValueError("give one of prompt, messages and prompt_tokens")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PromptPlan):
    cached_tokens: int  # what the prefix cache holds of it now
    disk_tokens: int  # behind them, what could be loaded from the cache folder


class Reset(BaseModel):
    freed_blocks: int


@router.post("/tokenize")
async def tokenize(ask: TextAsk, request: Request) -> Tokens:
    service = Service.of(request, ask.model)
    engine = service.engine.engine
    tokens = await asyncio.to_thread(_encoded, service, ask.prompt, ask.messages, ask.add_special_tokens)
    return Tokens(count=len(tokens), max_model_len=engine.scheduler.capacity, tokens=tokens)


@router.post("/detokenize")
async def detokenize(ask: TokensAsk, request: Request) -> Text:
    engine = Service.of(request, ask.model).engine.engine
    limit = engine.model.spec.vocab_size - 1
    if wrong := next((token for token in ask.tokens if token > limit), None):
        raise InvalidPrompt(f"There is no token {wrong}; ids are whole numbers from 0 to {limit}.")
    return Text(prompt=engine.tokenizer.decode(ask.tokens, skip_special_tokens=False))


@router.post("/plan")
async def plan(ask: PlanAsk, request: Request) -> Plan:
    """What a prompt would cost here, without running it."""
    service = Service.of(request, ask.model)
    tokens: list[int] = []
    if isinstance(ask.prompt, list):
        tokens = ask.prompt
    elif ask.prompt_tokens is None:
        tokens = await asyncio.to_thread(_encoded, service, ask.prompt, ask.messages, True)
    num_tokens = ask.prompt_tokens or len(tokens)
    if not num_tokens:
        raise InvalidPrompt("The prompt is empty: it has 0 tokens. Give at least 1.")
    engine = service.engine.engine
    if num_tokens > (limit := MAX_PLANNED_CONTEXTS * engine.scheduler.capacity):
        raise PromptTooLong(f"The prompt has {num_tokens} tokens; plans are made for {limit} at most.")
    scope: str = request.state.sharing_scope
    num_cached, num_on_disk = await service.engine.call(lambda engine: engine.num_known(tokens, scope=scope))
    planned = await asyncio.to_thread(engine.plan, num_tokens, chunk_size=ask.chunk_size)
    return Plan(**asdict(planned), cached_tokens=num_cached, disk_tokens=num_on_disk)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Reset:
    """Forgets every prefix that nobody is using now."""
    return Reset(freed_blocks=await Service.of(request, None).engine.call(Engine.forget_prefixes))


def _encoded(
    service: Service, prompt: str | None, messages: list[GivenMessage] | None, add_special_tokens: bool
) -> list[int]:
    engine = service.engine.engine
    if prompt is not None:
        return engine.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    return engine.prompts.message_tokens(service.messages(messages or []))
