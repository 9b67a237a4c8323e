"""`/v1/embeddings`: texts in, vectors out; a long text is read in chunks like any prompt."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from penstock.request import Output, Pooling
from penstock.server.asks import MAX_PROMPTS, ChunkSize, InertFields, TokenId
from penstock.server.run import CLIENT_CLOSED_REQUEST, Choice, Run, unless_disconnected
from penstock.server.service import Service

router = APIRouter()


class EmbeddingAsk(InertFields):
    model: str
    input: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    pooling: Pooling = "mean"
    chunk_size: ChunkSize = None

    @property
    def inputs(self) -> list[str | list[int]]:
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@router.post("/v1/embeddings", response_model=EmbeddingAnswer)
async def embeddings(ask: EmbeddingAsk, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(ask.model)
    reader = service.engine.engine.prompts

    def encoded() -> list[list[int]]:
        return [reader.text_tokens(given) if isinstance(given, str) else given for given in ask.inputs]

    prompts = await asyncio.to_thread(encoded)
    for tokens in prompts:
        service.check_length(len(tokens))
    run = Run(service, request)
    settings = {"pooling": ask.pooling, "max_tokens": 1, "chunk_size": ask.chunk_size}
    await run.start([Choice(prompt=each, settings=settings, num_prompt_tokens=len(each)) for each in prompts])
    try:
        outputs = await unless_disconnected(request, run.finish())
    finally:
        run.close()
    if outputs is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(_answer(ask, outputs).model_dump())


def _answer(ask: EmbeddingAsk, outputs: list[Output]) -> EmbeddingAnswer:
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    return EmbeddingAnswer(
        data=[
            Embedding(index=index, embedding=_vector(output.embedding or (), ask.encoding_format))
            for index, output in enumerate(outputs)
        ],
        model=ask.model,
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def _vector(values: tuple[float, ...], encoding: str | None) -> list[float] | str:
    """As numbers, or as the bytes of 32-bit floats in base64, which is what OpenAI's client asks for."""
    return base64.b64encode(array("f", values).tobytes()).decode() if encoding == "base64" else list(values)
