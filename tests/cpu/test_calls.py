"""Calls and reasoning of a tiny model behind the server, in forms whose markers are special tokens and in others."""

import asyncio
import json

import httpx
import pytest
from call_templates import CALLS, TURNS
from tiny_chat_model import save_tiny_chat_model

from penstock.config import EngineConfig
from penstock.errors import InvalidSetting
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
ASKED = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City", "title": "A"}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
# As libraries write classes of people: each a definition, and a reference to it.
PARAMETERS = {"$ref": "#/$defs/Asked", "$defs": {"Asked": ASKED, "City": {"type": "string", "enum": ["Bonn", "Rome"]}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SPECIAL = {
    "mistral-args": ["[TOOL_CALLS]", "[ARGS]"],
    "harmony": ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|call|>", "<|end|>"],
    "qwen-xml": [],
    "kimi-k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
    "gemma4": ['<|"|>', "<|tool_call>", "<tool_call|>"],
    "functiongemma": [],
    "deepseek-dsml": ["｜DSML｜"],
    "pythonic": [],
}
THINKING = TURNS.replace("<|turn|>assistant\n{% endif %}", "<|turn|>assistant\n<think>\n{% endif %}")
OPEN = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 120, "temperature": 1.0, "seed": 1}


def asked(folder, *bodies, **settings):
    """The answers of a server to bodies, and its metrics."""

    async def asking():
        config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1)
        app = make_app(ServerSettings(model=str(folder), **settings), config)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            await app.state.loading
            given = [{"model": str(folder), "messages": ASK} | body for body in bodies]
            answers = [await client.post("/v1/chat/completions", json=one) for one in given]
            return answers, (await client.get("/metrics")).text

    return asyncio.run(asking())


def deltas(answer):
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice["delta"] for event in events for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize("name", SPECIAL)
def test_a_required_call_is_written_in_the_form_of_the_family(tmp_path, name):
    save_tiny_chat_model(tmp_path, TURNS.replace("CALLS", CALLS[name]), special_tokens=SPECIAL[name])
    (whole, streamed), metrics = asked(tmp_path, OPEN, OPEN | {"stream": True})
    (choice,) = whole.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    given = json.loads(call["function"]["arguments"])
    assert (call["function"]["name"], set(given)) == ("weather", {"city", "days"})
    assert given["city"] in ("Bonn", "Rome")
    assert given["days"] in (1, 2)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    parts = [part["function"] for delta in deltas(streamed) for part in delta.get("tool_calls", ())]
    assert "".join(part.get("name", "") for part in parts) == "weather"
    assert "".join(part["arguments"] for part in parts) == call["function"]["arguments"]
    assert "".join(delta.get("content", "") for delta in deltas(streamed)) == ""
    assert "penstock:unread_calls_total 0.0" in metrics


def test_reasoning_that_the_prompt_opens_is_told_apart(tmp_path):
    save_tiny_chat_model(tmp_path, THINKING.replace("CALLS", CALLS["hermes"]))
    ask = {"max_tokens": 6, "seed": 1}
    (whole, streamed), _ = asked(tmp_path, ask, ask | {"stream": True})
    (choice,) = whole.json()["choices"]
    message = choice["message"]
    assert message["content"] == ""
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert "".join(delta.get("reasoning_content", "") for delta in deltas(streamed)) == message["reasoning_content"]
    (plain,), _ = asked(tmp_path, ask, reasoning_parser="none")
    (choice,) = plain.json()["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"].strip() == message["reasoning_content"].strip()


def test_a_parser_that_is_named_comes_before_the_template(tmp_path):
    save_tiny_chat_model(tmp_path, TURNS.replace("CALLS", "?{{ calls[0].function.name }}?"))
    (refused,), _ = asked(tmp_path, OPEN)
    assert refused.status_code == 400
    assert "--tool-parser" in refused.json()["error"]["message"]
    (answer,), _ = asked(tmp_path, OPEN, tool_parser="glm")
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_there_is_not_is_refused(setting):
    with pytest.raises(InvalidSetting, match=f"There is no {setting} 'x'; known ones are .*harmony"):
        ServerSettings(model="a", **{setting: "x"})
