"""Anthropic's API through its own client, unmodified, against a live server whose tokens follow a script."""

import json

import anthropic
import httpx
import pytest
from hang_bound import HANG_S
from scripted_model import call, playing
from server_process import events

KEY = "a-key-for-tests"
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Now.", "input_schema": PARAMETERS}
ANSWERS = ["I look.\n" + call("weather", city="Paris") + "\n" + call("weather", city="Lyon"), "Mild; STOP here."]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--chunk-size", "32", "--api-key", KEY, "--max-prompt-tokens", "5000")
    with playing(tmp_path_factory.mktemp("messages"), ANSWERS, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def ask(client, **fields):
    return client.messages.create(**{"model": "tiny", "max_tokens": 100, "messages": ASK} | fields)


def post(server, path="/v1/messages", **body):
    given = {"model": "tiny", "max_tokens": 100, "messages": ASK} | body
    return httpx.post(server.url + path, json=given, timeout=HANG_S, headers={"x-api-key": KEY})


def streamed(server, **body):
    given = {"model": "tiny", "max_tokens": 100, "messages": ASK, "stream": True} | body
    headers = {"x-api-key": KEY}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=given, timeout=HANG_S, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(event) for event in events(answer)]


def test_a_question_is_answered(client):
    answer = ask(client)
    assert [block.text for block in answer.content] == ["Mild; STOP here."]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.model) == (
        "end_turn",
        None,
        "assistant",
        "tiny",
    )
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["never", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "Mild; "


def test_tools_are_called_and_their_results_read(client):
    first = ask(client, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    text, *calls = first.content
    assert text.text == "I look."
    assert [(one.name, one.input) for one in calls] == [("weather", {"city": "Paris"}), ("weather", {"city": "Lyon"})]
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": "18 degrees"} for one in calls]
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = ask(client, tools=[WEATHER], messages=messages)
    assert (second.content[0].text, second.stop_reason) == ("Mild; STOP here.", "end_turn")


@anthropic.beta_tool
def weather(city: str) -> str:
    """Now.

    Args:
        city: Its name.
    """
    return f"18 degrees in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_sends_only_what_is_new(client, stream):
    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=100, messages=ASK, tools=[weather], stream=stream, system="Be brief."
    )
    first, second = [step.get_final_message() if stream else step for step in runner]
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert second.content[0].text == "Mild; STOP here."
    assert second.usage.cache_read_input_tokens > 0


def test_a_thread_goes_on_where_it_was_with_what_it_was_given(client, server):
    thread = client.beta.messages.thread(
        model="tiny", max_tokens=100, system="Be brief.", tools=[WEATHER], messages=ASK
    )
    (_, *calls) = thread.send().content
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": "18 degrees"} for one in calls]
    turn = [{"role": "user", "content": results}]
    kept = {"type": "continue", "previous_message_id": thread.previous_message_id}
    answers = [post(server, messages=turn, thread=kept).json() for _ in range(2)]  # it may be continued twice
    whole = [*thread.messages, *turn]
    assert thread.send(*turn).content[0].text == "Mild; STOP here."
    assert [one["content"][0]["text"] for one in answers] == ["Mild; STOP here."] * 2
    usage = answers[0]["usage"]
    num_prompt = sum(usage[name] for name in usage if "input_tokens" in name)
    assert num_prompt == count(client, messages=whole, system="Be brief.", tools=[WEATHER])
    assert post(server, messages=turn, thread=kept, system="Be long.").status_code == 400


def test_a_thread_that_is_gone_is_begun_again_by_the_client(client, server):
    gone = post(server, thread={"type": "continue", "previous_message_id": "msg_x"})
    assert (gone.status_code, gone.json()["error"]["details"]) == (404, {"error_code": "thread_not_found"})
    thread = client.beta.messages.thread(model="tiny", max_tokens=100, messages=ASK)
    thread.send()
    thread._state._thread.previous_message_id = "msg_x"
    assert thread.send({"role": "user", "content": "Sure?"}).content[0].text == "Mild; STOP here."


def test_usage_tells_what_the_cache_held_and_what_it_took(client, server):
    asked = {"system": "A system prompt of this test alone, long enough for some blocks. " * 3}
    num_tokens = client.messages.count_tokens(model="tiny", messages=ASK, **asked).input_tokens
    for num_cached in (0, 16 * ((num_tokens - 1) // 16)):
        usage = ask(client, **asked).usage
        assert usage.cache_read_input_tokens == num_cached
        assert usage.cache_creation_input_tokens == 16 * (num_tokens // 16) - num_cached
        assert usage.input_tokens == num_tokens % 16
    last = streamed(server, **asked)
    assert last[0]["message"]["usage"]["cache_read_input_tokens"] in (0, num_cached)  # 0: nothing was known of it yet
    (delta,) = (event for event in last if event["type"] == "message_delta")
    assert delta["usage"]["cache_read_input_tokens"] == num_cached


def test_a_stream_has_one_block_after_the_other(client, server):
    seen = streamed(server, tools=[WEATHER])
    types = [event["type"] for event in seen if event["type"] not in ("ping", "content_block_delta")]
    block = ["content_block_start", "content_block_stop"]
    assert types == ["message_start", *block * 3, "message_delta", "message_stop"]
    parts = [event["delta"]["partial_json"] for event in seen if event.get("index") == 1 and "delta" in event]
    assert len(parts) > 1
    assert json.loads("".join(parts)) == {"city": "Paris"}
    with client.messages.stream(model="tiny", max_tokens=100, messages=ASK, tools=[WEATHER]) as stream:
        found = stream.get_final_message()
    whole = ask(client, tools=[WEATHER])
    shown = [
        [(one.type, getattr(one, "text", None), getattr(one, "input", None)) for one in m.content]
        for m in (found, whole)
    ]
    assert shown[0] == shown[1]
    assert found.stop_reason == whole.stop_reason == "tool_use"


def test_pings_tell_the_progress_while_the_prompt_is_read(server):
    long = [{"role": "user", "content": "A long report. " * 1000}]
    pings = [event for event in streamed(server, messages=long) if event["type"] == "ping"]
    assert pings[0]["prompt_progress"]["total"] > 3000
    assert pings[0]["prompt_progress"]["processed"] <= pings[0]["prompt_progress"]["total"]


def count(client, **fields):
    return client.messages.count_tokens(**{"model": "tiny", "messages": ASK} | fields).input_tokens


def test_a_billing_header_is_dropped_and_metadata_is_inert(client, server):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2f1;"}
    said = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    assert count(client, system=[billing, said]) == count(client, system="Be kind.") > count(client)
    assert count(client, system=[billing]) == count(client)
    inert = {"metadata": {"user_id": "a"}, "context_management": {"edits": []}, "service_tier": "auto"}
    assert post(server, **inert, thinking={"type": "adaptive"}, output_config={"effort": "high"}).status_code == 200


def test_what_only_another_server_makes_is_left_out_and_reported(server):
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes?"}]
    messages = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": "Go on."}]
    answer = post(server, messages=messages, tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}])
    assert answer.status_code == 200
    assert answer.headers["x-penstock-skipped-blocks"] == "redacted_thinking"
    assert answer.headers["x-penstock-skipped-tools"] == "web_search_20250305"


@pytest.mark.parametrize(
    ("body", "status", "kind", "word"),
    [
        ({"model": "other"}, 404, "not_found_error", "'tiny' is"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"temperature": "warm"}, 400, "invalid_request_error", "temperature"),
        ({"typical_p": 0.5}, 400, "invalid_request_error", "typical_p"),
        (
            {"messages": [{"role": "user", "content": "word " * 6000}]},
            400,
            "invalid_request_error",
            "prompt is too long",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "I"}]}, 400, "invalid_request_error", "not continued"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            *(400, "invalid_request_error", "blocks of this type"),
        ),
    ],
)
def test_errors_have_the_shape_that_its_clients_read(server, body, status, kind, word):
    refused = post(server, **body)
    assert refused.status_code == status
    told = refused.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert word in told["error"]["message"]
    assert told["request_id"] == refused.headers["x-request-id"]


def test_the_client_raises_its_own_errors(client, server):
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0))


def test_leaving_a_stream_ends_its_request(server):
    body = {
        "model": "tiny",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "word " * 4000}],
        "stream": True,
    }
    before = server_metric(server, "request_cancelled_total")
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=HANG_S, headers={"x-api-key": KEY}):
        pass
    assert server.logs('"finish": "cancelled"')
    assert server_metric(server, "request_cancelled_total") == before + 1


def server_metric(server, name):
    text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"penstock:{name} ")))
