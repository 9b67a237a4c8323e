"""Tokens that a GPU draws against those of the CPU: on the card, or in Triton's interpreter without one."""

import math
import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from penstock.engine.draws import Draw, draw_tokens, floors, numbers_of
from penstock.kernels import triton_sampling
from penstock.request import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ASKS = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.7, "top_p": 0.3}, {}]
ASKS += [{"temperature": 1.2, "min_p": 0.1}, {"temperature": 1, "top_k": 5}, {"temperature": 1, "top_p": 0.001}]
ASKS += [{"temperature": 1.5, "top_k": 40, "top_p": 0.5, "min_p": 0.02}]


def on_device(logits, draws):
    numbers = torch.from_numpy(numbers_of(draws)).to(DEVICE)
    there = logits.to(DEVICE)
    return triton_sampling.draw(there, numbers, floors(there, numbers[5], max(draw.top_k for draw in draws))).tolist()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize("size", [100, 5003])
def test_a_seed_draws_the_same_tokens_on_every_device(size, spread):
    logits = torch.randn(3 * len(ASKS), size, generator=torch.Generator().manual_seed(1)) * spread
    draws = [Draw.of(SamplingParams(**ask), 7, place) for place, ask in enumerate(ASKS * 3)]
    assert on_device(logits, draws) == draw_tokens(logits, torch.from_numpy(numbers_of(draws)), draws).tolist()


def test_rows_without_a_choice_are_told():
    logits = torch.zeros(3, 70)
    logits[0] = -math.inf
    logits[1, 4] = math.nan
    assert on_device(logits, [Draw.of(SamplingParams(temperature=1, top_p=0.9), 1, 0)] * 3)[:2] == [-1, -1]
