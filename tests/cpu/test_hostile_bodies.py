"""Bodies of requests that somebody broke on purpose, asked of the whole app: refused in a sentence, or answered."""

import asyncio
import json
import time

import pytest
from hostile_inputs import FEW, MANY, MAX_GROWTH_BYTES, broken
from tiny_chat_model import save_tiny_chat_model

from penstock.config import EngineConfig
from penstock.plan.machine import resident_bytes
from penstock.server.app import make_app
from penstock.server.inside import post_inside
from penstock.server.settings import ServerSettings

USER = {"role": "user", "content": "What is a penstock?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["."], "logit_bias": {"5": -3}}
BODIES = {
    "/v1/chat/completions": [
        {"messages": [USER], "max_tokens": 1, **SAMPLING, "logprobs": True, "top_logprobs": 2},
        {"messages": [USER], "max_tokens": 1, "response_format": FORM},
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "max_tokens": 1,
        },
    ],
    "/v1/completions": [{"prompt": "The water", "max_tokens": 1, "echo": True, **SAMPLING}, {"prompt": [5, 6, 7]}],
    "/v1/responses": [
        {"input": "A text", "max_output_tokens": 1, "instructions": "Be short."},
        {"input": [USER], "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 1},
    ],
    "/v1/messages": [
        {"messages": [USER], "max_tokens": 1, "system": [{"type": "text", "text": "Be short."}]},
        {"messages": [USER], "max_tokens": 1, "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ],
    "/v1/embeddings": [{"input": ["a", "b"]}],
    "/tokenize": [{"prompt": "a text"}, {"messages": [USER]}],
    "/plan": [{"prompt_tokens": 100}, {"prompt": "a text"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile-bodies")
    save_tiny_chat_model(folder, max_tokens=256)
    return str(folder)


@pytest.mark.parametrize("number", [FEW // 4, pytest.param(MANY // 7, marks=pytest.mark.evidence)])
def test_broken_bodies_are_refused_or_answered_and_nothing_of_ours_fails(folder, number, capsys):
    config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1, max_running=4)

    async def asking():
        app = make_app(ServerSettings(model=folder, aliases=("m",)), config)
        rows, answered = [], set()
        async with app.router.lifespan_context(app):
            await app.state.loading
            before = resident_bytes()
            for path, bodies in BODIES.items():
                wholes, counts, slowest_s = [json.dumps({"model": "m"} | body).encode() for body in bodies], {}, 0.0
                for content in [*wholes, *broken(wholes, number, seed=31)]:
                    content = content.replace(b'"n":', b'"m":')  # choices would only take long
                    began_at = time.perf_counter()
                    status, answer = await post_inside(app, path, content, "a")
                    slowest_s = max(slowest_s, time.perf_counter() - began_at)
                    assert status < 500 or status == 501, (path, content[:2000], answer[:500])
                    json.loads(answer)
                    counts[status] = counts.get(status, 0) + 1
                answered |= {path} if counts.get(200) else set()
                rows.append(f"| {path} | {number:,} | {counts} | {slowest_s:.3f} |")
            grown = resident_bytes() - before
        return rows, answered, grown

    rows, answered, grown = asyncio.run(asking())
    with capsys.disabled():
        print("", *rows, f"grown by {grown / 1e6:.0f} MB", sep="\n")
    assert answered == set(BODIES)
    assert grown < MAX_GROWTH_BYTES
