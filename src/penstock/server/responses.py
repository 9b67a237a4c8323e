"""`/v1/responses`: the newer of OpenAI's two APIs, created or streamed; nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from penstock.server import sse
from penstock.server.answers import PromptTokensDetails, ToolCall
from penstock.server.conversation import Conversation, Ended, Reply, Said
from penstock.server.problems import NotHonoured
from penstock.server.response_asks import ResponseAsk
from penstock.server.run import CLIENT_CLOSED_REQUEST, Run, unless_disconnected
from penstock.server.service import Service

router = APIRouter()
Status = Literal["in_progress", "completed", "incomplete"]


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


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputMessage | OutputCall]
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputMessage | OutputCall | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None


@router.post("/v1/responses", response_model=ResponseAnswer)
async def responses(ask: ResponseAsk, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(ask.model)
    try:
        chat_ask = ask.as_chat()
    except ValidationError as error:
        raise NotHonoured(error.errors()[0]["msg"].removeprefix("Value error, ") + ".") from None
    run = Run(service, request)
    created = CreatedResponse(ask, Conversation(service, chat_ask, run))
    await created.conversation.start()
    if ask.stream:
        return run.streamed(created.events())
    try:
        answer = await unless_disconnected(request, created.answer())
    finally:
        run.close()
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(answer.model_dump())


class CreatedResponse:
    """A conversation in the shape of a response."""

    def __init__(self, ask: ResponseAsk, conversation: Conversation) -> None:
        self.conversation = conversation
        self._ask, self._run = ask, conversation.run
        self._message_id = f"msg_{self._run.request_id}"
        self._num_events = 0

    async def answer(self) -> ResponseAnswer:
        (reply,) = await self.conversation.replies()
        return self._finished(reply)

    async def events(self) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        said: list[str] = []
        async for part in self.conversation.parts():
            if isinstance(part, Said | Ended) and part.text:
                if not said:
                    for event in self._begin_message():
                        yield event
                said.append(part.text)
                yield self._text_event("delta", delta=part.text, logprobs=[])
            else:
                yield sse.NOTHING
            if isinstance(part, Ended):
                for event in self._end(part, "".join(said)):
                    yield event

    def _begin_message(self) -> list[bytes]:
        message = self._message("in_progress", None)
        part = OutputText(text="")
        return [
            self._event("response.output_item.added", output_index=0, item=message),
            self._event(
                "response.content_part.added", item_id=self._message_id, output_index=0, content_index=0, part=part
            ),
        ]

    def _end(self, ended: Ended, text: str) -> list[bytes]:
        reply = Reply(text=text, calls=ended.calls, reason=ended.reason, output=ended.output)
        answer = self._finished(reply)
        found: list[bytes] = []
        for index, item in enumerate(answer.output):
            if isinstance(item, OutputMessage):
                if not text:
                    found += self._begin_message()
                found.append(self._text_event("done", text=text, logprobs=[]))
                where = {"item_id": self._message_id, "output_index": index, "content_index": 0}
                found.append(self._event("response.content_part.done", **where, part=item.content[0]))
            else:
                begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
                where = {"item_id": item.id, "output_index": index}
                found.append(self._event("response.output_item.added", output_index=index, item=begun))
                found.append(self._event("response.function_call_arguments.delta", **where, delta=item.arguments))
                found.append(self._event("response.function_call_arguments.done", **where, arguments=item.arguments))
            found.append(self._event("response.output_item.done", output_index=index, item=item))
        name = "response.completed" if answer.status == "completed" else "response.incomplete"
        return [*found, self._event(name, response=answer)]

    def _finished(self, reply: Reply) -> ResponseAnswer:
        status: Status = "incomplete" if reply.reason == "length" else "completed"
        items: list[OutputMessage | OutputCall] = [_call(call) for call in reply.calls]
        if reply.text or not items:
            items = [self._message(status, reply.text), *items]
        answer = self._response(status, items)
        answer.incomplete_details = Incomplete() if status == "incomplete" else None
        output = reply.output
        answer.usage = ResponseUsage(
            input_tokens=output.num_prompt_tokens,
            input_tokens_details=PromptTokensDetails(cached_tokens=output.num_cached_tokens),
            output_tokens=len(output.token_ids),
            total_tokens=output.num_prompt_tokens + len(output.token_ids),
        )
        return answer

    def _message(self, status: Status, text: str | None) -> OutputMessage:
        content = [] if text is None else [OutputText(text=text)]
        return OutputMessage(id=self._message_id, status=status, content=content)

    def _response(self, status: Status, output: list[OutputMessage | OutputCall]) -> ResponseAnswer:
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
            parallel_tool_calls=ask.parallel_tool_calls is not False,
            temperature=ask.temperature,
            text={"format": form or {"type": "text"}},
            tool_choice="auto" if ask.tool_choice is None else ask.model_dump()["tool_choice"],
            tools=[tool.model_dump() for tool in ask.tools or []],
            top_p=ask.top_p,
        )

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        where = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        return self._event(f"response.output_text.{kind}", **where, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        event = ResponseEvent(type=name, sequence_number=self._num_events, **fields)
        self._num_events += 1
        # Whole documents inside, so that their defaults are sent too; the event's own empty fields are not.
        document = {key: value for key, value in event.model_dump().items() if key in event.model_fields_set}
        return sse.named_event(name, document)


def _call(call: ToolCall) -> OutputCall:
    return OutputCall(id=f"fc_{call.id}", call_id=call.id, name=call.function.name, arguments=call.function.arguments)
