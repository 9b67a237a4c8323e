"""Which device and dtype a model gets, and what is said of them."""

import platform
import sys

import pytest

from penstock.config import GIB
from penstock.errors import InvalidSetting
from penstock.plan.devices import DeviceMemory, choose_dtype, device_warnings, has_apple_gpu, require_device
from penstock.plan.machine import has_fast_bfloat16


def test_the_device_that_is_there_is_taken_and_another_is_refused():
    assert [require_device("auto", has_cuda=there) for there in (False, True)] == ["cpu", "cuda"]
    assert require_device("cpu", has_cuda=True) == "cpu"
    with pytest.raises(InvalidSetting, match="finds no GPU"):
        require_device("cuda", has_cuda=False)


def test_apples_gpu_is_taken_on_such_a_machine_with_a_word(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(InvalidSetting, match="no Mac"):
        require_device("mps", has_cuda=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert has_apple_gpu()
    assert require_device("mps", has_cuda=False) == "mps"
    assert "never tried" in device_warnings("mps")[0]
    assert device_warnings("cpu") == device_warnings("cuda") == []


def test_the_dtype_is_the_checkpoints_where_that_is_fast():
    assert choose_dtype("float32", {"dtype": "bfloat16"}) == "float32"
    assert choose_dtype("auto", {}) == "float32"
    assert choose_dtype("auto", {"torch_dtype": "float16"}, "cuda") == "bfloat16"
    assert choose_dtype("auto", {"dtype": "bfloat16"}) == ("bfloat16" if has_fast_bfloat16() else "float32")


def test_kernels_for_all_of_a_model_make_bfloat16_fast():
    assert choose_dtype("auto", {"dtype": "bfloat16"}, has_kernels=lambda: True) == "bfloat16"
    assert choose_dtype("auto", {"dtype": "float32"}, has_kernels=lambda: True) == "float32"
    assert choose_dtype("auto", {"dtype": "bfloat16"}, "mps", lambda: True) == "float32"


def test_what_others_hold_of_a_card_is_not_our_runtime():
    alone = DeviceMemory(total_bytes=80 * GIB, free_bytes=80 * GIB - GIB // 2)
    shared = DeviceMemory(total_bytes=80 * GIB, free_bytes=40 * GIB)
    assert (alone.runtime_bytes, shared.runtime_bytes) == (GIB // 2, GIB)
    assert shared.runtime_bytes < shared.default_budget < 41 * GIB
