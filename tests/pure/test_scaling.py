"""What of the room `ray` runs without Ray: how many replicas a backlog needs, and what is said where it is missing."""

from importlib.util import find_spec

import pytest

import penstock.ray
from penstock.errors import InvalidSetting
from penstock.ray.scaling import BacklogScaling


def test_a_backlog_above_the_target_brings_as_many_as_it_needs():
    scaling = BacklogScaling(target_s=5.0)
    assert scaling.wanted(4.9, 1, {}, 0.0)[0] == 1
    assert scaling.wanted(5.1, 1, {}, 0.0)[0] == 2
    assert scaling.wanted(31.0, 2, {}, 0.0)[0] == 7


def test_fewer_must_be_enough_for_a_while_before_one_goes():
    scaling = BacklogScaling(target_s=5.0, patience_s=10.0)
    number, state = scaling.wanted(1.0, 3, {}, 100.0)
    assert number == 3
    assert scaling.wanted(1.0, 3, state, 109.0)[0] == 3
    assert scaling.wanted(1.0, 3, state, 111.0) == (2, {})
    assert scaling.wanted(9.0, 3, state, 105.0) == (3, {})  # what came meanwhile begins the time again


def test_the_last_replica_stays():
    assert BacklogScaling(target_s=5.0).wanted(0.0, 1, {"few_since": 0.0}, 1e6)[0] == 1


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("name", ["Reader", "app"])
def test_without_ray_the_extra_is_named(name):
    with pytest.raises(InvalidSetting, match=r"penstock\[ray\]"):
        getattr(penstock.ray, name)
