"""`/v1/responses`: the newer of OpenAI's two APIs: created or streamed, kept for a while, found again and deleted."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, TypeAdapter
from starlette.responses import JSONResponse

from penstock.answer.events import ReasoningDelta, WrittenAnswer, text_of
from penstock.engine.engine import Event
from penstock.request import Finished, Output, Token
from penstock.server import sse
from penstock.server.openai.answers import PromptTokensDetails
from penstock.server.openai.conversation import converse
from penstock.server.openai.response_asks import Item, ReasoningText, ResponseAsk, sealed
from penstock.server.problems import as_asked, problem_of
from penstock.server.run import Choice, Run, Shape
from penstock.server.service import Service

router = APIRouter()
GivenItems: TypeAdapter[Any] = TypeAdapter(Item)
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status = "completed"


class OutputReasoning(BaseModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None
    status: Status = "completed"


class ReasoningDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails = ReasoningDetails()
    total_tokens: int


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Failure(BaseModel):
    code: str
    message: str


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


@router.post("/v1/responses", response_model=ResponseAnswer)
async def responses(ask: ResponseAsk, request: Request) -> Response:
    service = Service.of(request, ask.model)
    run = Run(service, request)
    earlier = ask.previous_response_id
    before = [] if earlier is None else service.responses.messages(run.sharing_scope, earlier)
    chat_ask = as_asked(lambda: ask.as_chat(before))
    run.report("skipped_items", ask.skipped_items)
    await converse(run, chat_ask)
    return await run.respond(CreatedResponse(ask, run, before), is_streamed=ask.stream)


@router.get("/v1/responses/{response_id}", response_model=ResponseAnswer)
async def stored_response(response_id: str, request: Request) -> Response:
    stored = Service.of(request, None).responses
    return JSONResponse(stored.answer(request.state.sharing_scope, response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    Service.of(request, None).responses.delete(request.state.sharing_scope, response_id)
    return DeletedResponse(id=response_id)


class CreatedResponse(Shape):
    """A conversation in the shape of a response: thoughts that came first, a text, calls."""

    def __init__(self, ask: ResponseAsk, run: Run, before: list[dict[str, Any]]) -> None:
        self._ask, self._run, self._before = ask, run, before
        self._message_id, self._reasoning_id = f"msg_{run.request_id}", f"rs_{run.request_id}"
        self._num_events = 0
        self._text = self._thoughts = ""  # told so far

    def answer(self) -> dict[str, Any]:
        (choice,), (output,) = self._run.choices, self._run.outputs
        return self._finished(choice.written, output).model_dump()

    def failed(self, error: BaseException, request_id: str) -> bytes:
        _, told = problem_of(error, request_id)
        answer = self._response("failed", [])
        answer.error = Failure(code=told.error.code or "server_error", message=told.error.message)
        return self._event("response.failed", response=answer)

    def begin(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response("in_progress", [])) for name in names)

    def tell(self, choice: Choice | None, event: Event | None) -> bytes:
        if choice is None or not isinstance(event, Token | Finished):
            return sse.NOTHING
        thoughts = "".join(news.text for news in choice.news if isinstance(news, ReasoningDelta))
        told = self._tell_thoughts(thoughts) + self._tell_text(text_of(choice.news))
        if isinstance(event, Finished):
            told += self._tell_end(self._finished(choice.written, event.output))
        return told

    def _tell_thoughts(self, thoughts: str) -> bytes:
        """Tells thoughts as they come; those that come after a text has begun stand in the response alone."""
        if not thoughts or self._text:
            return sse.NOTHING
        begun = sse.NOTHING
        if not self._thoughts:
            item = OutputReasoning(id=self._reasoning_id, status="in_progress", content=[])
            begun = self._event("response.output_item.added", output_index=0, item=item)
        self._thoughts += thoughts
        where = {"item_id": self._reasoning_id, "output_index": 0, "content_index": 0}
        return begun + self._event("response.reasoning_text.delta", **where, delta=thoughts)

    def _tell_text(self, text: str) -> bytes:
        if not text:
            return sse.NOTHING
        begin = sse.NOTHING if self._text else self._begin_message()
        self._text += text
        return begin + self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    @property
    def _place(self) -> dict[str, Any]:
        """Says where the text is: it is the first item, or the one after the thoughts."""
        return {"item_id": self._message_id, "output_index": 1 if self._thoughts else 0, "content_index": 0}

    def _begin_message(self) -> bytes:
        message = OutputMessage(id=self._message_id, status="in_progress", content=[])
        added = self._event("response.output_item.added", output_index=self._place["output_index"], item=message)
        return added + self._event("response.content_part.added", **self._place, part=OutputText(text=""))

    def _tell_end(self, answer: ResponseAnswer) -> bytes:
        """Ends the items that were begun, and tells the others whole."""
        found: list[bytes] = []
        for index, item in enumerate(answer.output):
            where = {"item_id": item.id, "output_index": index}
            if isinstance(item, OutputMessage):
                (part,) = item.content
                found.append(sse.NOTHING if self._text else self._begin_message())
                found.append(self._event("response.output_text.done", **self._place, text=part.text, logprobs=[]))
                found.append(self._event("response.content_part.done", **self._place, part=part))
            elif isinstance(item, OutputReasoning):
                if self._thoughts:
                    text = item.content[0].text
                    found.append(self._event("response.reasoning_text.done", **where, content_index=0, text=text))
                else:
                    found.append(self._event("response.output_item.added", output_index=index, item=item))
            else:
                begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
                found.append(self._event("response.output_item.added", output_index=index, item=begun))
                found.append(self._event("response.function_call_arguments.delta", **where, delta=item.arguments))
                found.append(self._event("response.function_call_arguments.done", **where, arguments=item.arguments))
            found.append(self._event("response.output_item.done", output_index=index, item=item))
        return b"".join([*found, self._event(f"response.{answer.status}", response=answer)])

    def _reasoning(self, written: WrittenAnswer) -> OutputReasoning:
        is_sealed = "reasoning.encrypted_content" in (self._ask.include or ())
        return OutputReasoning(
            id=self._reasoning_id,
            content=[ReasoningText(type="reasoning_text", text=written.reasoning)],
            encrypted_content=sealed(written.reasoning) if is_sealed else None,
        )

    def _keep(self, answer: ResponseAnswer) -> None:
        """Keeps the response and its conversation, unless that was not wanted."""
        if self._ask.store is False:
            return
        items = [GivenItems.validate_python(item.model_dump()).for_chat() for item in answer.output]
        conversation = [*self._before, *self._ask.given_messages(), *items]
        self._run.service.responses.keep(self._run.sharing_scope, answer.model_dump(), conversation)

    def _finished(self, written: WrittenAnswer, output: Output) -> ResponseAnswer:
        text, calls = written.text, written.calls
        status: Status = "incomplete" if output.finish_reason == "length" and not calls else "completed"
        items: list[Any] = [
            OutputCall(id=f"fc_{call.id}", call_id=call.id, name=call.name, arguments=call.arguments) for call in calls
        ]
        if text or not items:
            items = [OutputMessage(id=self._message_id, status=status, content=[OutputText(text=text)]), *items]
        if written.reasoning:  # behind a text that was told before it
            items.insert(1 if self._text and not self._thoughts else 0, self._reasoning(written))
        answer = self._response(status, items)
        answer.incomplete_details = Incomplete() if status == "incomplete" else None
        answer.usage = ResponseUsage(
            input_tokens=output.num_prompt_tokens,
            input_tokens_details=PromptTokensDetails.of(output.hits),
            output_tokens=len(output.token_ids),
            total_tokens=output.num_prompt_tokens + len(output.token_ids),
        )
        self._keep(answer)
        return answer

    def _response(self, status: Status, output: list[Any]) -> ResponseAnswer:
        ask = self._ask
        form = ask.text.format.model_dump(by_alias=True, exclude_none=True) if ask.text and ask.text.format else None
        return ResponseAnswer(
            id=f"resp_{self._run.request_id}",
            created_at=self._run.created,
            status=status,
            model=ask.model,
            output=output,
            instructions=ask.instructions,
            max_output_tokens=ask.max_output_tokens,
            metadata=ask.metadata or {},
            previous_response_id=ask.previous_response_id,
            store=ask.store is not False,
            parallel_tool_calls=ask.parallel_tool_calls is not False,
            temperature=ask.temperature,
            text={"format": form or {"type": "text"}},
            tool_choice="auto" if ask.tool_choice is None else ask.model_dump()["tool_choice"],
            tools=[tool.model_dump() for tool in ask.tools or []],
            top_p=ask.top_p,
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        self._num_events += 1
        return sse.event({"type": name, "sequence_number": self._num_events - 1} | fields, name)
