"""`/v1/responses`: the newer of OpenAI's two APIs, created or streamed; nothing is stored."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from penstock.answer.events import WrittenAnswer, WrittenCall, text_of
from penstock.engine.engine import Event
from penstock.request import Finished, Output, Token
from penstock.server import sse
from penstock.server.openai.answers import PromptTokensDetails
from penstock.server.openai.conversation import converse
from penstock.server.openai.response_asks import ResponseAsk
from penstock.server.problems import Refused
from penstock.server.run import Choice, Run, Shape
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


@router.post("/v1/responses", response_model=ResponseAnswer)
async def responses(ask: ResponseAsk, request: Request) -> Response:
    service = Service.of(request, ask.model)
    try:
        chat_ask = ask.as_chat()
    except ValidationError as error:
        raise Refused(error.errors()[0]["msg"].removeprefix("Value error, ") + ".") from None
    run = Run(service, request)
    if ask.skipped_items:
        run.report("skipped_items", ask.skipped_items)
    await converse(run, chat_ask)
    return await run.respond(CreatedResponse(ask, run), is_streamed=ask.stream)


class CreatedResponse(Shape):
    """A conversation in the shape of a response."""

    def __init__(self, ask: ResponseAsk, run: Run) -> None:
        self._ask, self._run = ask, run
        self._message_id = f"msg_{run.request_id}"
        self._num_events = 0
        self._text = ""  # told so far

    def answer(self) -> dict[str, Any]:
        (choice,), (output,) = self._run.choices, self._run.outputs
        return self._finished(choice.written, output).model_dump()

    def begin(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response("in_progress", [])) for name in names)

    def tell(self, choice: Choice | None, event: Event | None) -> bytes:
        if choice is not None and isinstance(event, Token):
            return self._tell_text(text_of(choice.news))
        if choice is not None and isinstance(event, Finished):
            told = self._tell_text(text_of(choice.news))
            return told + self._tell_end(self._finished(choice.written, event.output))
        return sse.NOTHING

    def _tell_text(self, text: str) -> bytes:
        if not text:
            return sse.NOTHING
        begin = sse.NOTHING if self._text else self._begin_message()
        self._text += text
        return begin + self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    @property
    def _place(self) -> dict[str, Any]:
        """Says where the text is; the message is the first item, where there is one."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _begin_message(self) -> bytes:
        message = OutputMessage(id=self._message_id, status="in_progress", content=[])
        added = self._event("response.output_item.added", output_index=0, item=message)
        return added + self._event("response.content_part.added", **self._place, part=OutputText(text=""))

    def _tell_end(self, answer: ResponseAnswer) -> bytes:
        found: list[bytes] = []
        for index, item in enumerate(answer.output):
            if isinstance(item, OutputMessage):
                (part,) = item.content
                found.append(sse.NOTHING if part.text else self._begin_message())
                found.append(self._event("response.output_text.done", **self._place, text=part.text, logprobs=[]))
                found.append(self._event("response.content_part.done", **self._place, part=part))
            else:
                begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
                where = {"item_id": item.id, "output_index": index}
                found.append(self._event("response.output_item.added", output_index=index, item=begun))
                found.append(self._event("response.function_call_arguments.delta", **where, delta=item.arguments))
                found.append(self._event("response.function_call_arguments.done", **where, arguments=item.arguments))
            found.append(self._event("response.output_item.done", output_index=index, item=item))
        return b"".join([*found, self._event(f"response.{answer.status}", response=answer)])

    def _finished(self, written: WrittenAnswer, output: Output) -> ResponseAnswer:
        text, calls = written.text, written.calls
        status: Status = "incomplete" if output.finish_reason == "length" and not calls else "completed"
        items: list[OutputMessage | OutputCall] = [_call(call) for call in calls]
        if text or not items:
            message = OutputMessage(id=self._message_id, status=status, content=[OutputText(text=text)])
            items = [message, *items]
        answer = self._response(status, items)
        answer.incomplete_details = Incomplete() if status == "incomplete" else None
        answer.usage = ResponseUsage(
            input_tokens=output.num_prompt_tokens,
            input_tokens_details=PromptTokensDetails(cached_tokens=output.num_cached_tokens),
            output_tokens=len(output.token_ids),
            total_tokens=output.num_prompt_tokens + len(output.token_ids),
        )
        return answer

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

    def _event(self, name: str, **fields: Any) -> bytes:
        self._num_events += 1
        return sse.event({"type": name, "sequence_number": self._num_events - 1} | fields, name)


def _call(call: WrittenCall) -> OutputCall:
    return OutputCall(id=f"fc_{call.id}", call_id=call.id, name=call.name, arguments=call.arguments)
