"""The app before its model is there."""

import asyncio

import httpx
import pytest

from penstock.config import EngineConfig
from penstock.errors import InvalidSetting
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings


def ask(method, path, **options):
    async def asking():
        app = make_app(ServerSettings(model="smollm2"), EngineConfig())
        transport = httpx.ASGITransport(app=app)  # runs no lifespan, so nothing is ever loaded
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(asking())


def test_while_the_model_is_loaded_health_and_requests_are_503():
    health = ask("GET", "/health")
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    refused = ask("POST", "/v1/completions", json={"model": "smollm2", "prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "being loaded" in refused.json()["error"]["message"]
    assert ask("GET", "/version").status_code == 200


def test_the_clients_own_request_id_is_kept_if_it_is_a_plain_word():
    assert ask("GET", "/health", headers={"x-request-id": "my-7"}).headers["x-request-id"] == "my-7"
    assert ask("GET", "/health", headers={"x-request-id": "a b\t"}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"api_keys": ("",)}, {"max_choices": 0}, {"request_timeout_s": 0.0}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(InvalidSetting):
        ServerSettings(model="smollm2", **wrong)
