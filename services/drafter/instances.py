"""Which target lives have shaken hands, and which of them have a stream open. No grpc, no torch."""

from __future__ import annotations

from collections import Counter

from common import limits
from common.errors import Overloaded


class TargetInstances:
    """Known target lives. A life without a stream is forgotten when another one shakes hands: it is an
    earlier life of the same target, or will shake hands again."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._streams: Counter[str] = Counter()

    def admit(self, instance_id: str) -> set[str]:
        """A life shook hands. Returns the lives that are known now; the sessions of all others are over."""
        living = {known for known in self._known if self._streams[known] > 0} | {instance_id}
        if len(living) > limits.TARGET_INSTANCES_MAX:
            raise Overloaded("target instances", limit=limits.TARGET_INSTANCES_MAX, given=len(living))
        self._known = living
        return set(living)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._known

    @property
    def streaming(self) -> set[str]:
        """Lives with at least one stream open."""
        return {instance_id for instance_id, count in self._streams.items() if count > 0}

    def stream_began(self, instance_id: str) -> None:
        self._streams[instance_id] += 1

    def stream_ended(self, instance_id: str) -> None:
        self._streams[instance_id] -= 1
        if not self._streams[instance_id]:
            del self._streams[instance_id]
