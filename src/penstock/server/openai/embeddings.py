"""`/v1/embeddings`: texts in, vectors out; a long text is read in chunks like any prompt."""

from __future__ import annotations

import base64
from array import array
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock.request import Pooling, SamplingParams
from penstock.server.openai.asks import ChunkSize, InertFields, Texts, listed
from penstock.server.run import Run, Shape
from penstock.server.service import Service

router = APIRouter()


class EmbeddingAsk(InertFields):
    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] | None = "float"
    pooling: Pooling = "mean"
    chunk_size: ChunkSize = None


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
    run = Run(Service.of(request, ask.model), request)
    prompts = await run.service.encoded(listed(ask.input))
    await run.start(prompts, SamplingParams(pooling=ask.pooling, max_tokens=1), chunk_size=ask.chunk_size)
    return await run.respond(Vectors(ask, run))


class Vectors(Shape):
    def __init__(self, ask: EmbeddingAsk, run: Run) -> None:
        self._ask, self._run = ask, run

    def answer(self) -> dict[str, Any]:
        outputs = self._run.outputs
        num_tokens = sum(output.num_prompt_tokens for output in outputs)
        vectors = [_vector(output.embedding or (), self._ask.encoding_format) for output in outputs]
        return EmbeddingAnswer(
            data=[Embedding(index=index, embedding=vector) for index, vector in enumerate(vectors)],
            model=self._ask.model,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        ).model_dump()


def _vector(values: tuple[float, ...], encoding: str | None) -> list[float] | str:
    """Writes numbers, or the bytes of 32-bit floats in base64, which is what OpenAI's client asks for."""
    return base64.b64encode(array("f", values).tobytes()).decode() if encoding == "base64" else list(values)
