"""Tools, JSON, responses, embeddings and tokens through OpenAI's client, on a tiny model with a real tokenizer."""

import base64
import json
import struct

import httpx
import openai
import pytest
from hang_bound import HANG_S
from server_process import events, serving
from tiny_chat_model import save_tiny_chat_model

from penstock.trace.document import Trace, TraceStep

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(model):
    with serving(model, "--chunk-size", "32", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=HANG_S)


# --- tools ---


def is_weather(arguments):
    given = json.loads(arguments)
    return set(given) == {"city", "unit"} and given["unit"] in ("celsius", "kelvin")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_tool_is_called_with_arguments_that_fit_its_schema(client, model, choice):
    answer = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=200, seed=1
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert is_weather(call.function.arguments)
    assert answer.choices[0].message.content is None


def test_the_named_one_of_several_tools_is_called(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=ASK,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "clock"}},
        max_tokens=200,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {})


def test_a_call_is_streamed_as_it_is_written(client, model):
    stream = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=200, seed=2, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    first, *more = [call for choice in chunks for call in choice.delta.tool_calls or []]
    assert (first.index, first.type, first.function.name, first.function.arguments) == (0, "function", "weather", "")
    assert len(more) > 3
    assert {(call.index, call.id, call.function.name) for call in more} == {(0, None, None)}
    assert is_weather("".join(call.function.arguments for call in more))
    assert "".join(choice.delta.content or "" for choice in chunks) == ""
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_conversation_goes_on_after_a_call(client, model):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "18 degrees"})
    answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None
    without = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=5
    )
    assert without.usage.prompt_tokens < answer.usage.prompt_tokens


# --- JSON ---


def test_json_mode_and_schemas_bind_the_answer(client, model):
    ask = {"model": model, "messages": ASK, "max_tokens": 400, "seed": 3}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    given = json.loads(client.chat.completions.create(**ask, response_format=form).choices[0].message.content)
    assert set(given) == {"name", "size"}
    assert given["size"] in (1, 2, 3)
    any_object = client.chat.completions.create(**ask | {"max_tokens": 4}, response_format={"type": "json_object"})
    assert any_object.choices[0].message.content.startswith("{")


def test_the_empty_schema_takes_any_json(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "anything", "schema": {}}}
    answer = client.chat.completions.create(model=model, messages=ASK, response_format=form, max_tokens=8)
    assert answer.choices[0].message.content
    asked = {"format": {"type": "json_schema", "name": "anything", "schema": {}}}
    assert client.responses.create(model=model, input="a", text=asked, max_output_tokens=8).output_text


def nested(depth, close=True):
    return '{"a":' * depth + "1" + "}" * depth * close


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (nested(60), 200),
        (nested(65), 400),
        (nested(900), 400),
        (nested(100_000), 400),
        (nested(100_000, close=False), 400),
        ('{"a": ' + "9" * 5_000 + "}", 400),
        ('{"a": ' + "9" * 4_000 + "}", 200),
        ("{", 200),  # cut off, as clients keep it
    ],
)
def test_arguments_of_a_call_that_are_too_deep_or_too_long_are_refused(server, model, arguments, status):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    given = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    answer = post(server, "/v1/chat/completions", model=model, messages=given, max_tokens=1)
    assert answer.status_code == status
    assert status == 200 or "The arguments of the call 'call_1' are" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [65, 300, 900])
def test_schemas_that_are_nested_too_deeply_are_refused(server, model, depth):
    deep = json.loads(nested(depth))
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    for asked in ({"tools": [tool]}, {"response_format": form}, {"metadata": deep}):
        refused = post(server, "/v1/chat/completions", model=model, messages=ASK, max_tokens=1, **asked)
        assert refused.status_code == 400
        assert "nested deeper than 64 levels" in refused.json()["error"]["message"]


def test_a_schema_that_cannot_be_used_is_refused(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(model=model, messages=ASK, response_format=form)


# --- responses ---


def test_a_response_is_created_with_its_usage(client, model):
    answer = client.responses.create(model=model, input="Hello", instructions="Be kind.", max_output_tokens=6)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 6
    assert answer.output_text == answer.output[0].content[0].text
    again = client.responses.create(model=model, input="Hello", instructions="Be kind.", max_output_tokens=1)
    assert again.usage.input_tokens_details.cached_tokens == 16 * ((again.usage.input_tokens - 1) // 16)


def test_a_response_is_streamed_in_the_order_that_clients_expect(client, model):
    with client.responses.stream(model=model, input=[{"role": "user", "content": "Hi"}], max_output_tokens=5) as stream:
        seen = [*stream]
    types = [event.type for event in seen]
    assert types[:4] == [
        *["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    ]
    assert types[-4:] == [
        *["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]
    ]
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert seen[-1].response.output[0].content[0].text == text
    assert [event.sequence_number for event in seen] == [*range(len(seen))]


def test_a_response_can_call_a_tool_and_take_a_schema(client, model):
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    called = client.responses.create(
        model=model, input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=200
    )
    (call,) = called.output
    assert call.type == "function_call"
    assert is_weather(call.arguments)
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    bound = client.responses.create(model=model, input="A thing?", text=form, max_output_tokens=400)
    assert json.loads(bound.output_text)["size"] in (1, 2, 3)


def test_what_a_response_cannot_do_is_refused(client, model):
    with pytest.raises(openai.NotFoundError, match="resp_1"):
        client.responses.create(model=model, input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.responses.create(model=model, input="Hi", tool_choice="required")


# --- embeddings, tokens, plans ---


def test_embeddings_have_length_one_and_tell_texts_apart(client, server, model):
    answer = client.embeddings.create(model=model, input=["the cat", "the cat", "a long report " * 50])
    first, same, other = (one.embedding for one in answer.data)
    assert sum(x * x for x in first) == pytest.approx(1, abs=1e-4)
    assert first == pytest.approx(same, abs=1e-4)
    assert first != pytest.approx(other, abs=1e-2)
    assert answer.usage.prompt_tokens > 100
    last = post(server, "/v1/embeddings", model=model, input="the cat", pooling="last").json()["data"][0]["embedding"]
    assert len(last) == len(first) == 32
    assert last != pytest.approx(first, abs=1e-2)
    encoded = post(server, "/v1/embeddings", model=model, input="the cat", encoding_format="base64").json()
    packed = base64.b64decode(encoded["data"][0]["embedding"])
    assert struct.unpack("<32f", packed) == pytest.approx(first, abs=1e-4)
    assert post(server, "/v1/embeddings", model=model, input="a", dimensions=5).status_code == 400


def test_tokens_there_and_back(server, model):
    found = post(server, "/tokenize", prompt="The weather in Paris").json()
    assert found["count"] == len(found["tokens"]) == 4
    assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "The weather in Paris"}
    chat = post(server, "/tokenize", messages=ASK).json()
    assert "<|im_start|>assistant" in post(server, "/detokenize", tokens=chat["tokens"]).json()["prompt"]
    assert post(server, "/detokenize", tokens=[99_999_999]).status_code == 400
    assert post(server, "/tokenize", prompt="a", messages=ASK).status_code == 400


def test_a_plan_costs_nothing_and_knows_what_is_cached(server, client, model):
    tokens = [*range(100, 300)]
    before = post(server, "/plan", prompt=tokens).json()
    assert (before["prompt_tokens"], before["cached_tokens"], before["num_chunks"]) == (200, 0, 7)
    assert before["fits"]
    client.completions.create(model=model, prompt=tokens, max_tokens=1)
    assert post(server, "/plan", prompt=tokens).json()["cached_tokens"] == 192
    assert post(server, "/reset_prefix_cache").json()["freed_blocks"] >= 12
    assert post(server, "/plan", prompt=tokens).json()["cached_tokens"] == 0
    assert not post(server, "/plan", prompt_tokens=9_000).json()["fits"]
    assert post(server, "/plan", prompt_tokens=9_000_000).status_code == 413


@pytest.mark.parametrize(
    "url", ["http://example.org/a.png", "file:///etc/passwd", "/etc/passwd", "data:text/html;base64,aa"]
)
def test_no_address_is_fetched_and_no_path_opened(server, model, url):
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    refused = post(server, "/v1/chat/completions", model=model, messages=[{"role": "user", "content": content}])
    assert refused.status_code == 400
    assert "data URL" in refused.json()["error"]["message"]


def test_an_image_for_a_model_without_eyes_is_refused(server, model):
    pixel = "data:image/png;base64," + base64.b64encode(b"not looked at").decode()
    content = [{"type": "image_url", "image_url": {"url": pixel}}]
    refused = post(server, "/v1/chat/completions", model=model, messages=[{"role": "user", "content": content}])
    assert refused.status_code == 400
    assert "text only" in refused.json()["error"]["message"]


def test_a_request_brings_its_own_chunk_size(server, model):
    """To every path that reads a prompt, and to the plan of it."""
    asks = {
        "/v1/completions": {"prompt": [*range(600, 640)], "max_tokens": 1},
        "/v1/chat/completions": {"messages": ASK, "max_tokens": 1},
        "/v1/responses": {"input": "What is the weather in Paris?", "max_output_tokens": 1},
        "/v1/embeddings": {"input": [*range(700, 740)]},
    }
    for path, ask in asks.items():
        for chunk_size in (7, 0, "auto"):
            post(server, "/reset_prefix_cache")
            assert post(server, path, model=model, chunk_size=chunk_size, **ask).status_code == 200
            trace = Trace.model_validate_json(httpx.get(f"{server.url}/trace").content)
            request = trace.requests[-1]
            sizes = [chunk.end - chunk.start for chunk in chunks_of(trace, request.id) if chunk.kind == "prefill"]
            num_tokens = request.prompt_tokens
            assert sum(sizes) == num_tokens
            assert sizes[0] == (7 if chunk_size == 7 else num_tokens), path
        for wrong in (-1, "many", 2.5):
            assert post(server, path, model=model, chunk_size=wrong, **ask).status_code == 400
    plans = {size: post(server, "/plan", prompt_tokens=100, chunk_size=size).json() for size in (7, 0, None)}
    assert {size: plan["num_chunks"] for size, plan in plans.items()} == {7: 15, 0: 1, None: 4}


def chunks_of(trace, request_id):
    return [chunk for step in trace.steps for chunk in step.chunks if chunk.request_id == request_id]


def test_the_trace_of_the_last_minutes_tells_every_chunk(server, client, model):
    client.completions.create(model=model, prompt=[*range(400, 500)], max_tokens=3, extra_body={"ignore_eos": True})
    trace = Trace.model_validate_json(httpx.get(f"{server.url}/trace").content)
    request = trace.requests[-1]
    chunks = chunks_of(trace, request.id)
    assert [(chunk.kind, chunk.start, chunk.end) for chunk in chunks] == [
        *[("prefill", 0, 32), ("prefill", 32, 64), ("prefill", 64, 96), ("prefill", 96, 100)],
        *[("decode", 100, 101), ("decode", 101, 102)],
    ]
    assert (request.outcome, request.written_tokens, len(request.gaps_ms)) == ("length", 3, 2)
    assert trace.lane.applied
    recent = Trace.model_validate_json(httpx.get(f"{server.url}/trace", params={"seconds": 0.001}).content)
    assert (recent.steps, recent.requests) == ((), ())
    assert recent.num_dropped_steps == len(trace.steps)
    assert httpx.get(f"{server.url}/trace", params={"seconds": -1}).status_code == 400


def test_the_timeline_is_the_same_records_as_they_are_made(server, client, model):
    with httpx.stream("GET", f"{server.url}/timeline", timeout=HANG_S) as watched:
        records = (json.loads(line) for line in events(watched) if line.startswith("{"))
        assert next(records)["format"] == "penstock-trace"
        client.completions.create(model=model, prompt=[*range(300, 310)], max_tokens=2)
        last_id = Trace.model_validate_json(httpx.get(f"{server.url}/trace").content).requests[-1].id
        seen = []
        while not any(record["type"] == "request" and record["id"] == last_id for record in seen):
            seen.append(next(records))
    whole = Trace.model_validate_json(httpx.get(f"{server.url}/trace").content)
    steps = [TraceStep.model_validate(record) for record in seen if record["type"] == "step"]
    assert steps == [step for step in whole.steps if step.step <= steps[-1].step]
