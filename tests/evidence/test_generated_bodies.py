"""Streamed requests drawn at random, right ones and wrong ones: each is answered to its end or refused without 5xx."""

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest
from call_templates import CALLS, TURNS
from hang_bound import until
from tiny_chat_model import save_tiny_chat_model

from penstock.config import EngineConfig
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7200)]
NUM_BODIES, NUM_BESIDE = 5_000, 8
ENDS = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
TEXTS = [
    "",
    "Hi",
    "é \U0001f600 \ud800",
    "<tool_call>",
    "</tool_call>{",
    "\n\n",
    "a b " * 40,
    "{{ x }}",
    "<|im_end|>",
    "\0",
]
SCHEMAS = [
    {},
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "$defs": {"A": {"enum": ["x", 1]}},
    },
    {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"]}}},
    {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"me": {"$ref": "#/$defs/A"}}}}},
    {
        "type": "object",
        "properties": {"l": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"const": "q"}]}}},
    },
]
NAMES = ["f", "weather", "a.b-c_d"]


class Drawn:
    """Bodies for the three APIs of conversations, and for completions; some with one mistake."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def body(self):
        path, make = self._one(
            [
                ("/v1/chat/completions", self._chat),
                ("/v1/messages", self._messages),
                ("/v1/responses", self._response),
                ("/v1/completions", self._completion),
            ]
        )
        body = {"model": "tiny", "stream": True} | make() | self._some(temperature=[0, 1.0, 2], top_p=[0.1, 1.0])
        if self._draw.random() < 0.3:
            self._spoil(body)
        return path, body

    def _one(self, values):
        return self._draw.choice(values)

    def _some(self, **fields):
        return {name: self._one(values) for name, values in fields.items() if self._draw.random() < 0.3}

    def _text(self):
        return "".join(self._one(TEXTS) for _ in range(self._draw.randrange(1, 4)))

    def _arguments(self):
        return self._one([{}, {"a": "x"}, {"n": 1, "s": None}, {"l": [1, "q", {"deep": [[]]}]}, {"é": self._text()}])

    def _spoil(self, value):
        """Takes away, exchanges or adds one thing somewhere."""
        while True:
            keys = [*value] if isinstance(value, dict) else [*range(len(value))]
            if not keys:
                return
            key = self._one(keys)
            if isinstance(value[key], (dict, list)) and self._draw.random() < 0.7:
                value = value[key]
                continue
            how = self._draw.randrange(3)
            if how == 0:
                del value[key]
            else:
                value[key] = self._one(
                    [None, -1, 1e99, "", "x" * 300, [], {}, [[]], {"type": "x"}, True, [None], 2**70]
                )
            return

    def _tools(self, make):
        return {
            "tools": [make(name, self._one(SCHEMAS)) for name in self._draw.sample(NAMES, self._draw.randrange(1, 4))]
        }

    def _chat(self):
        messages = [{"role": "system", "content": self._text()}] if self._draw.random() < 0.5 else []
        for _ in range(self._draw.randrange(1, 4)):
            messages.append(
                {"role": "user", "content": self._one([self._text(), [{"type": "text", "text": self._text()}]])}
            )
            if self._draw.random() < 0.5:
                function = {"name": self._one(NAMES), "arguments": json.dumps(self._arguments())}
                call = {"id": "c1", "type": "function", "function": function}
                messages.append({"role": "assistant", "content": self._one([None, "I look."]), "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": "c1", "content": self._text()})
        body = {"messages": messages, "max_tokens": self._draw.randrange(1, 24)}
        if self._draw.random() < 0.6:
            body |= self._tools(
                lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}
            )
            named = {"type": "function", "function": {"name": self._one(NAMES)}}
            body |= self._some(tool_choice=["auto", "none", "required", named], parallel_tool_calls=[False, True])
        elif self._draw.random() < 0.3:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": self._one(SCHEMAS)}}
            body |= {"response_format": self._one([form, {"type": "json_object"}])}
        options = [{"include_usage": True}, {"continuous_usage_stats": True}]
        body |= self._some(stop=["e", ["<", "x"]], n=[1, 3], seed=[1, -5], logprobs=[True], stream_options=options)
        return body | self._some(
            return_progress=[True], reasoning_effort=["low", "none"], min_tokens=[3], top_k=[-1, 5]
        )

    def _messages(self):
        messages = []
        for _ in range(self._draw.randrange(1, 4)):
            text = {"type": "text", "text": self._text(), "cache_control": self._one([None, {"type": "ephemeral"}])}
            messages.append({"role": "user", "content": self._one([self._text(), [text]])})
            if self._draw.random() < 0.5:
                used = {"type": "tool_use", "id": "c1", "name": self._one(NAMES), "input": self._arguments()}
                thought = {"type": "thinking", "thinking": self._text(), "signature": ""}
                messages.append({"role": "assistant", "content": [thought, text, used]})
                result = {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": self._one([None, self._text(), [text]]),
                }
                messages.append({"role": "user", "content": [result, text]})
        body = {"messages": messages, "max_tokens": self._draw.randrange(1, 24)}
        if self._draw.random() < 0.6:
            body |= self._tools(lambda name, schema: {"name": name, "input_schema": schema})
            body |= self._some(
                tool_choice=[{"type": "any"}, {"type": "none"}, {"type": "tool", "name": self._one(NAMES)}]
            )
        body |= self._some(system=[self._text(), [{"type": "text", "text": "x-anthropic-billing-header: 1"}]])
        return body | self._some(thread=[{"type": "create"}], stop_sequences=[["e"]], thinking=[{"type": "adaptive"}])

    def _response(self):
        items = []
        for _ in range(self._draw.randrange(1, 4)):
            items.append({"role": "user", "content": self._one([self._text(), [{"type": "input_text", "text": "Hm"}]])})
            if self._draw.random() < 0.5:
                arguments = json.dumps(self._arguments())
                items.append(
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
                )
                items.append(
                    {"type": "function_call", "call_id": "c1", "name": self._one(NAMES), "arguments": arguments}
                )
                items.append({"type": "function_call_output", "call_id": "c1", "output": self._text()})
        body = {"input": self._one([items, self._text()]), "max_output_tokens": self._draw.randrange(1, 24)}
        if self._draw.random() < 0.6:
            body |= self._tools(lambda name, schema: {"type": "function", "name": name, "parameters": schema})
            body |= self._some(tool_choice=["auto", "required", {"type": "function", "name": self._one(NAMES)}])
        body |= self._some(store=[False], include=[["reasoning.encrypted_content"]], reasoning=[{"effort": "high"}])
        return body | self._some(previous_response_id=["resp_x"], instructions=[self._text()], truncation=["auto"])

    def _completion(self):
        body = {"prompt": self._one([self._text() + ".", [self._text() + "."] * 2, [5, 6, 7]]), "max_tokens": 8}
        return body | self._some(echo=[True], logprobs=[0, 3], n=[2], stop=["e"], suffix=[""], ignore_eos=[True])


def ended(text):
    """Whether a stream says that it is over."""
    last = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")][-1]
    return last == "[DONE]" or json.loads(last)["type"] in ENDS


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 11))])
def test_no_body_breaks_the_server(tmp_path, seed):
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_tiny_chat_model(folder, TURNS.replace("CALLS", CALLS["hermes"]))
    drawn, statuses, failures = Drawn(seed), Counter(), []

    async def ask(client):
        while statuses.total() < NUM_BODIES:
            path, body = drawn.body()
            given = json.dumps(body).encode()
            answer = await client.post(path, content=given, headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 or (
                answer.status_code == 200 and body.get("stream") and not ended(answer.text)
            ):
                failures.append((path, body, answer.status_code, answer.text[-500:]))

    async def scenario():
        config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1, context=1024)
        app = make_app(ServerSettings(model=str(folder)), config)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await app.state.loading
            await asyncio.gather(*(ask(client) for _ in range(NUM_BESIDE)))
            await until(lambda: app.state.service.board.num_running == 0)  # nothing is held

    asyncio.run(scenario())
    print(f"\nseed {seed}, {NUM_BODIES} bodies: {dict(sorted(statuses.items()))}")
    assert failures == []
    assert statuses[200] > NUM_BODIES / 4
