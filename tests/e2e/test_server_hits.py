"""What the cache keeps for agents: prefixes of calls until their results come, and states where conversations part."""

import httpx
import pytest
from hang_bound import HANG_S
from scripted_model import call, playing

BLOCK = 16
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SYSTEM = "You are an agent. " * 20
QUESTION = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
NO_HITS = {"running": 0, "pinned": 0, "recent": 0, "disk": 0}
ANSWERS = ["I look.\n" + call("weather", city="Paris"), "Mild."]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with playing(tmp_path_factory.mktemp("hits"), ANSWERS) as server:
        yield server


@pytest.fixture(scope="module", params=[False, True], ids=["attention alone", "hybrid"])
def small_server(request, tmp_path_factory):
    flags = ("--chunk-size", "512", "--pin-s", "0")
    with playing(tmp_path_factory.mktemp("forks"), ANSWERS, *flags, is_hybrid=request.param) as server:
        yield server


def post(server, path, **body):
    answer = httpx.post(server.url + path, json={"model": "tiny"} | body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server, messages, **body):
    return post(server, "/v1/chat/completions", messages=messages, **body)


def metric(server, name):
    lines = httpx.get(server.url + "/metrics", timeout=HANG_S).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"penstock:{name} ")).split()[-1])


def details(answer):
    return answer["usage"]["prompt_tokens_details"]


def asked_twice(server, system):
    """The usage of a question that a call answered, and of its result."""
    messages = [{"role": "system", "content": system}, QUESTION[1]]
    first = chat(server, messages, tools=[TOOL])
    message = {name: value for name, value in first["choices"][0]["message"].items() if value is not None}
    message.pop("refusal", None)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 degrees"}
    return first["usage"], chat(server, [*messages, message, result], tools=[TOOL])["usage"]


def test_the_prefix_of_a_call_is_pinned_until_its_result_comes(server):
    first, second = asked_twice(server, SYSTEM)
    # The token that ended the answer was not computed, and the template may write the call in its own way.
    expected = first["prompt_tokens"] // BLOCK * BLOCK
    found = second["prompt_tokens_details"]
    assert found["cached_tokens"] >= expected
    assert found["cached_tokens_by_reason"] == NO_HITS | {"pinned": found["cached_tokens"]}
    assert metric(server, "pinned_bytes") > 0
    assert metric(server, 'prefix_cache_hits_by_reason_total{reason="pinned"}') >= found["cached_tokens"]


def test_every_api_tells_hits_by_reason(server):
    ask = {"max_tokens": 50, "system": SYSTEM + "A.", "messages": [QUESTION[1]]}
    usage = [post(server, "/v1/messages", **ask)["usage"] for _ in range(2)][1]
    assert usage["cache_read_by_reason"] == NO_HITS | {"recent": usage["cache_read_input_tokens"]}
    assert usage["cache_read_input_tokens"] > 0
    ask = {"instructions": SYSTEM + "B.", "input": "What?"}
    found = [post(server, "/v1/responses", **ask)["usage"] for _ in range(2)][1]["input_tokens_details"]
    assert found["cached_tokens_by_reason"] == NO_HITS | {"recent": found["cached_tokens"]}
    assert found["cached_tokens"] > 0


def test_conversations_that_part_behind_the_system_prompt_share_it(small_server):
    """Of a hybrid too, whose states are kept at some places alone."""
    num_system = len(post(small_server, "/tokenize", messages=QUESTION[:1])["tokens"]) - 4  # with the next turn's start
    asks = [[QUESTION[0], {"role": "user", "content": f"{number} " * 700}] for number in (1, 2)]
    first, second = (details(chat(small_server, messages))["cached_tokens"] for messages in asks)
    assert first == 0
    assert second >= num_system // BLOCK * BLOCK > 5 * BLOCK


def test_a_marked_message_is_a_place_to_go_on_from(small_server):
    marked = [
        {"role": "system", "content": "You are a reader."},
        {"role": "user", "content": [{"type": "text", "text": "word " * 300, "cache_control": {"type": "ephemeral"}}]},
    ]
    asks = [[*marked, {"role": "user", "content": f"{number} " * 700}] for number in (1, 2)]
    first, second = (details(chat(small_server, messages))["cached_tokens"] for messages in asks)
    assert (first, second >= 300) == (0, True)
    ask = {"max_tokens": 20, "system": "You are a judge.", "messages": marked[1:]}
    for number in (1, 2):
        ask["messages"] = [marked[1], {"role": "user", "content": f"{number} " * 700}]
        usage = post(small_server, "/v1/messages", **ask)["usage"]
    assert usage["cache_read_input_tokens"] >= 300


def test_without_a_time_for_it_nothing_is_pinned(small_server):
    _, second = asked_twice(small_server, SYSTEM + "Be brief.")
    found = second["prompt_tokens_details"]["cached_tokens_by_reason"]
    assert found["recent"] > 0 == found["pinned"]
    assert metric(small_server, "pinned_bytes") == 0
