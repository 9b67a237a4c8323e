"""Images in requests: data URLs reach the model as the same picture does from a program."""

import base64
import io

import httpx
import pytest
from hang_bound import HANG_S
from server_process import serving
from tiny_models import save_tokenizer
from tiny_vision_models import llava_processor, pictures, tiny_vision_model

from penstock.engine.engine import Engine

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
