"""What agents send beside their question: names, metadata, knobs of the template, tools of other servers."""

import httpx
import openai
import pytest
from hang_bound import HANG_S
from server_process import serving
from tiny_chat_model import TEMPLATE, save_tiny_chat_model

THINKING = TEMPLATE.replace(
    "{%- if add_generation_prompt %}",
    "{%- if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
    "{%- if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    "{%- if add_generation_prompt %}",
).replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
CLOCK = {"type": "function", "name": "clock", "strict": False, "parameters": {"type": "object", "properties": {}}}
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "Tiny-1.5"
    folder.mkdir()
    save_tiny_chat_model(folder, THINKING)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serving(str(folder), "--dtype", "float32", "--alias", "gpt-5", "--alias", "a/b", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def post(server, path, headers=None, **body):
    headers = headers or {"x-api-key": KEY}
    return httpx.post(f"{server.url}{path}", json={"model": "Tiny-1.5"} | body, timeout=HANG_S, headers=headers)


def chat(server, **body):
    answer = post(server, "/v1/chat/completions", **{"messages": ASK, "max_tokens": 1} | body)
    assert answer.status_code == 200, answer.text
    return answer


def num_prompt(server, **body):
    return chat(server, **body).json()["usage"]["prompt_tokens"]


# --- names ---


def test_a_model_is_called_by_its_folder_and_answers_to_its_aliases(client, server):
    assert [model.id for model in client.models.list()] == ["Tiny-1.5", "gpt-5", "a/b"]
    for name in ("Tiny-1.5", "gpt-5", "a/b"):
        assert client.models.retrieve(name).id == name
        assert chat(server, model=name).json()["model"] == name


def test_no_answer_shows_the_path_of_the_model(client, server, folder):
    refused = post(server, "/v1/chat/completions", model="another", messages=ASK)
    assert refused.status_code == 404
    assert "'Tiny-1.5' is" in refused.json()["error"]["message"]
    told = [refused.text, client.models.list().to_json()]
    told += [httpx.get(f"{server.url}/{path}", headers={"x-api-key": KEY}).text for path in ("metrics", "trace")]
    assert "Tiny-1.5" in told[-1]
    assert not any(str(folder) in text for text in told)
    assert not any(str(folder) in line for line in server.log)


def test_a_name_may_be_given(folder):
    with serving(str(folder), "--dtype", "float32", "--name", "mine") as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["id"] == model["display_name"] == "mine"


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}])
def test_the_key_comes_in_either_header(server, headers):
    assert post(server, "/tokenize", prompt="a", headers=headers).status_code == 200
    wrong = {name: value + "x" for name, value in headers.items()}
    assert post(server, "/tokenize", prompt="a", headers=wrong).status_code == 401


# --- metadata and sampling ---

INERT = {
    "user": "somebody",
    "metadata": {"a": "b"},
    "client_metadata": {"session": "1"},
    "store": True,
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "verbosity": "low",
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": "auto"},
}


def test_metadata_changes_nothing(server):
    plain = {"messages": ASK, "max_tokens": 4, "temperature": 0}
    assert chat(server, **plain, **INERT).json()["choices"] == chat(server, **plain).json()["choices"]
    cached = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]
    plain = [{"role": "user", "content": "Hi"}]
    assert num_prompt(server, messages=cached) == num_prompt(server, messages=plain)


@pytest.mark.parametrize("sampling", [{"mirostat": 2}, {"typical_p": 0.5}, {"temperature": "warm"}, {"top_a": 0.1}])
def test_sampling_that_is_not_honoured_is_still_refused(server, sampling):
    refused = post(server, "/v1/chat/completions", messages=ASK, **sampling)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(sampling))


# --- knobs ---


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ({"reasoning_effort": "high"}, "effort high"),
        ({"reasoning": {"effort": "low"}}, "effort low"),
        ({"chat_template_kwargs": {"reasoning_effort": "medium"}}, "effort medium"),
        ({"enable_thinking": False}, "no thoughts"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "no thoughts"),
        ({"reasoning_effort": "none"}, "effort noneno thoughts"),
    ],
)
def test_a_knob_of_the_template_is_turned(server, asked, printed):
    """By exactly the tokens that it prints."""
    num_more = post(server, "/tokenize", prompt=printed, add_special_tokens=False).json()["count"]
    assert num_prompt(server, **asked) == num_prompt(server) + num_more


def test_what_the_template_does_not_read_changes_nothing_and_what_is_the_servers_is_refused(server):
    assert num_prompt(server, chat_template_kwargs={"colour": "red"}) == num_prompt(server)
    refused = post(server, "/v1/chat/completions", messages=ASK, chat_template_kwargs={"tools": []})
    assert refused.status_code == 400
    assert "'tools'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_earlier_thoughts_reach_the_template(server, field):
    def asked(**fields):
        return [*ASK, {"role": "assistant", "content": "Mild.", **fields}, {"role": "user", "content": "Sure?"}]

    num_more = post(server, "/tokenize", prompt="<think>It is spring.</think>").json()["count"]
    thought = num_prompt(server, messages=asked(**{field: "It is spring."}))
    assert abs(thought - num_prompt(server, messages=asked()) - num_more) <= 1  # a token may span the border


# --- what a coding agent sends to the responses API ---


def codex_body(**fields):
    """The shape of Codex's requests, in the middle of a task."""
    said = [{"type": "input_text", "text": "You are an agent."}]
    called = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "clock", "arguments": "{}"}
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": said},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        called,
        called | {"id": "fc_2", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "12:00"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "12:01"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    body = {
        "input": items,
        "tools": [CLOCK, {"type": "web_search", "external_web_access": False}, {"type": "namespace", "tools": []}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1",
        "client_metadata": {"thread": "01a1"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 4,
    }
    return body | fields


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_items_of_other_servers_are_left_out_and_reported(server, stream):
    answer = post(server, "/v1/responses", **codex_body(stream=stream))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-skipped-tools"] == "namespace, web_search"
    assert answer.headers["x-penstock-skipped-items"] == "web_search_call"
    assert server.logs('"skipped_tools": ["namespace", "web_search"]')


def test_what_the_assistant_did_in_one_turn_is_one_message(server):
    """As the template prints it when the same turn comes as a chat."""
    calls = [{"id": f"c{n}", "function": {"name": "clock", "arguments": "{}"}} for n in (1, 2)]
    messages = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "c2", "content": "12:01"},
    ]
    tool = {"type": "function", "function": {name: CLOCK[name] for name in ("name", "parameters")}}
    chatted = num_prompt(server, messages=messages, tools=[tool], reasoning_effort="medium")
    responded = post(server, "/v1/responses", **codex_body()).json()["usage"]
    assert responded["input_tokens"] == chatted
    assert responded["input_tokens_details"]["cached_tokens"] == 16 * ((chatted - 1) // 16)


def test_an_item_that_only_refers_to_another_is_refused(server):
    refused = post(server, "/v1/responses", input=[{"type": "item_reference", "id": "msg_1"}])
    assert refused.status_code == 400
    assert "send the item itself" in refused.json()["error"]["message"]
