"""Images in requests: data URLs reach the model as the same picture does from a program."""

import asyncio
import base64
import io

import httpx
import pytest
from hang_bound import HANG_S
from server_process import serving
from tiny_models import save_tokenizer
from tiny_vision_models import llava_processor, pictures, tiny_vision_model

from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings

TEMPLATE = (
    "{% for message in messages %}{{ ' ' + message['role'] }}{% for part in message['content'] %}"
    "{{ ' <image> ' if part['type'] == 'image' else ' ' + part['text'] }}{% endfor %}{% endfor %} w9"
)


def png(picture):
    held = io.BytesIO()
    picture.save(held, "PNG")
    return held.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    tiny_vision_model("llava").save_pretrained(path)
    save_tokenizer(path)
    processor = llava_processor()
    processor.chat_template = TEMPLATE
    processor.save_pretrained(path)
    return str(path)


def test_a_data_url_is_the_picture_itself(folder):
    first, second = map(png, pictures(2))

    def asked(image):
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w3 w4"}]
        body = {"model": folder, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
        return body | {"ignore_eos": True, "logprobs": True, "top_logprobs": 1}

    with Engine.load(folder, dtype="float32", memory="4GiB", threads=1) as engine:
        content = [{"type": "image", "image": first}, {"type": "text", "text": "w3 w4"}]
        expected = engine.generate([{"role": "user", "content": content}], max_tokens=6, ignore_eos=True, logprobs=1)
    with serving(folder, "--dtype", "float32", "--memory", "4GiB") as server:
        url = f"{server.url}/v1/chat/completions"
        answers = [httpx.post(url, json=asked(image), timeout=HANG_S) for image in (first, second)]
        broken = httpx.post(url, json=asked(b"no picture"), timeout=HANG_S)
        text = [{"role": "user", "content": [{"type": "text", "text": "w3 w4"}]}]
        body = {"model": folder, "messages": text, "max_tokens": 1, "prompt_logprobs": 0}
        scored = httpx.post(url, json=body, timeout=HANG_S)
    same, other = (answer.json() for answer in answers)
    assert same["choices"][0]["message"]["content"] == expected.text
    assert same["usage"]["prompt_tokens"] == expected.num_prompt_tokens > 10
    logprobs = [[one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]] for answer in (same, other)]
    assert logprobs[0] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-3)
    assert logprobs[0] != pytest.approx(logprobs[1], abs=1e-3)
    assert broken.status_code == 400
    places = scored.json()["choices"][0]["prompt_logprobs"]
    assert len(places) == scored.json()["usage"]["prompt_tokens"] > 1, "text beside no image is scored like any other"


WITH_TOOLS = "{% for tool in tools or () %} w7 {{ tool.function.name }} w8{% endfor %}" + TEMPLATE
CALLED = {"name": "w6", "arguments": "{}"}
TOOL = {"type": "function", "function": {"name": "w6", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("text_only", [False, True])
def test_a_conversation_has_tools_with_images_and_without_and_reads_as_it_does_in_the_text_part_alone(
    tmp_path, text_only
):
    tiny_vision_model("llava").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    processor = llava_processor()
    processor.chat_template = WITH_TOOLS
    processor.save_pretrained(tmp_path)
    config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1, text_only=text_only)
    url = "data:image/png;base64," + base64.b64encode(png(pictures(1)[0])).decode()
    text = [{"type": "text", "text": "w3 w4"}]
    bodies = [
        {"messages": [{"role": "user", "content": "w3 w4"}]},
        {"messages": [{"role": "user", "content": text}], "tools": [TOOL]},
        {
            "messages": [
                {"role": "user", "content": "w3"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": CALLED}]},
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url", "image_url": {"url": url}}]},
            ],
            "tools": [TOOL],
        },
    ]

    async def asking():
        app = make_app(ServerSettings(model=str(tmp_path), tool_parser="hermes"), config)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            await app.state.loading
            fixed = {"model": str(tmp_path), "max_tokens": 1}
            return [await client.post("/v1/chat/completions", json=fixed | body) for body in bodies]

    plain, with_tools, with_both = asyncio.run(asking())
    assert [answer.json()["usage"]["prompt_tokens"] for answer in (plain, with_tools)] == [4, 7]
    if text_only:
        assert (with_both.status_code, "1 image(s) given" in with_both.text) == (400, True), with_both.text
    else:
        assert with_both.json()["usage"]["prompt_tokens"] > 7, "the image of a tool's result is read"
