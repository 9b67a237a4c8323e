"""Devices that are not there are refused; one that was never tried says so."""

import platform
import sys

import pytest

import penstock
from penstock.errors import InvalidSetting


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")


def test_a_mac_is_planned_with_the_memory_of_the_machine_and_says_that_it_was_never_tried(mac):
    settings = {"prompt_tokens": 3000, "memory": "4GiB", "dtype": "float32", "quantize": "none"}
    planned = penstock.plan("smollm2", device="mps", **settings)
    on_cpu = penstock.plan("smollm2", device="cpu", **settings)
    assert any("mps was never tried" in adjustment for adjustment in planned.prompt.adjustments)
    assert planned.prompt.runtime_bytes == on_cpu.prompt.runtime_bytes
    assert planned.prompt.activation_bytes > on_cpu.prompt.activation_bytes, "torch attends there with scores in view"


def test_elsewhere_it_is_refused_with_a_way_out():
    with pytest.raises(InvalidSetting, match=r"Device 'mps' is not there: .* use --device cpu"):
        penstock.plan("smollm2", device="mps", prompt_tokens=100)
