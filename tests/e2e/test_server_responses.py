"""Responses that think, call and are kept, through OpenAI's client, from a server whose tokens follow a script."""

import httpx
import openai
import pytest
from hang_bound import HANG_S
from scripted_model import call, playing
from tiny_chat_model import TEMPLATE

KEYS = ("first-key", "second-key")
THINKING = TEMPLATE.replace(
    "\n{{ message.content }}",
    "\n{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}",
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
THOUGHTS = "<think>\nThe user asks.\n</think>\n\n"
ANSWERS = [THOUGHTS + "I look.\n" + call("weather", city="Paris"), "Mild."]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    with playing(tmp_path_factory.mktemp("responses"), ANSWERS, *keys, template=THINKING) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0)


def create(client, **fields):
    return client.responses.create(**{"model": "tiny", "input": "The weather in Paris?", "tools": [WEATHER]} | fields)


def test_thoughts_text_and_calls_are_items_of_their_own(client):
    thoughts, message, called = create(client).output
    assert thoughts.content[0].text == "The user asks."
    assert message.content[0].text == "I look."
    assert (called.name, called.arguments) == ("weather", '{"city": "Paris"}')


def plain(item):
    """Leaves out what the client adds."""
    return item.model_dump(exclude={"content": {"__all__": {"parsed"}}, "parsed_arguments": True})


def test_a_stream_tells_the_same_items(client):
    with client.responses.stream(model="tiny", input="The weather in Paris?", tools=[WEATHER]) as stream:
        seen = [*stream]
    whole, last = create(client), seen[-1].response
    assert seen[-1].type == "response.completed"
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert [plain(item) for item in done] == [plain(item) for item in last.output]
    added = [event.output_index for event in seen if event.type == "response.output_item.added"]
    assert added == [0, 1, 2]
    deltas = [event.delta for event in seen if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "The user asks."
    assert [event.sequence_number for event in seen] == [*range(len(seen))]


def test_a_response_goes_on_where_the_one_before_ended(client):
    first = create(client)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "18 degrees"}
    second = create(client, input=[result], previous_response_id=first.id)
    assert second.output_text == "Mild."
    given = [{"role": "user", "content": "The weather in Paris?"}, *(item.to_dict() for item in first.output), result]
    whole = create(client, input=given)
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.previous_response_id == first.id
    third = create(client, input="And tomorrow?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_thoughts_come_back_sealed_as_well(client):
    """As some agents send them: without their content."""
    result = {"type": "function_call_output", "output": "18 degrees"}
    counts = []
    for include in ([], ["reasoning.encrypted_content"]):
        first = create(client, include=include, store=False)
        items = [item.to_dict() for item in first.output]
        items[0]["content"] = None if include else items[0]["content"]
        question = {"role": "user", "content": "The weather in Paris?"}
        result["call_id"] = items[-1]["call_id"]
        counts.append(create(client, input=[question, *items, result]).usage.input_tokens)
    assert counts[0] == counts[1]


def test_a_response_is_found_again_by_its_own_key_until_it_is_deleted(client, server):
    kept = create(client)
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[1], max_retries=0)
    for ask in (other.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(kept.id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError, match="Send the whole conversation"):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.NotFoundError):
        create(client, previous_response_id=kept.id)


def test_one_that_is_not_to_be_stored_is_not(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(create(client, store=False).id)


def test_a_request_needs_the_key(server):
    assert httpx.get(f"{server.url}/v1/responses/resp_1", timeout=HANG_S).status_code == 401
