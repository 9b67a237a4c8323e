"""The measurement at load, under settings that leave it little room."""

import pytest
from tiny_models import prompt

from penstock.errors import QueueFull


@pytest.mark.parametrize("limit", [{"max_waiting": 1}, {"max_waiting": 2}, {"max_waiting_tokens": 300}])
def test_a_limited_queue_is_calibrated_within_its_limit_and_keeps_it(load, limit):
    engine = load(latency_target_ms=50, max_running=1, **limit)
    assert engine.scheduler.budget.cost is not None
    with pytest.raises(QueueFull):
        engine.generate_batch([prompt(200, seed=seed) for seed in range(4)])


def test_what_was_measured_at_load_has_no_number_among_the_requests(load):
    engine = load(latency_target_ms=50)
    assert engine.submit(prompt(20), max_tokens=1) == 0
