"""Which target lives a drafter knows."""

from __future__ import annotations

import pytest

from common import limits
from common.errors import Overloaded
from services.drafter.instances import TargetInstances


def test_a_new_life_ends_lives_without_a_stream_and_spares_those_with_one() -> None:
    instances = TargetInstances()
    for name in ("old", "other"):
        instances.admit(name)
        instances.stream_began(name)
    instances.stream_ended("old")
    assert instances.admit("new") == {"other", "new"}
    assert "old" not in instances and "other" in instances and "new" in instances
    assert instances.streaming == {"other"}


def test_a_life_with_two_streams_lives_until_both_ended() -> None:
    instances = TargetInstances()
    instances.admit("one")
    instances.stream_began("one")
    instances.stream_began("one")
    instances.stream_ended("one")
    assert instances.admit("two") == {"one", "two"}
    instances.stream_ended("one")
    assert instances.admit("two") == {"two"}


def test_lives_that_stream_are_bounded() -> None:
    instances = TargetInstances()
    for i in range(limits.TARGET_INSTANCES_MAX):
        instances.admit(f"life {i}")
        instances.stream_began(f"life {i}")
    with pytest.raises(Overloaded):
        instances.admit("one too many")
