"""The errors of the product. Each names the field, the limit and the value; none carries a path of
the machine or text of a prompt."""

from __future__ import annotations


class TandemError(Exception):
    """Base of all errors that are meant for a person to read."""


class InvalidRequest(TandemError):
    """A caller's field is out of range. Maps to INVALID_ARGUMENT."""

    def __init__(self, field: str, *, limit: object, given: object) -> None:
        self.field, self.limit, self.given = field, limit, given
        super().__init__(f"{field}: must be {limit}, got {given}")


class Overloaded(TandemError):
    """No room for another request now. Maps to RESOURCE_EXHAUSTED."""

    def __init__(self, what: str, *, limit: int, given: int) -> None:
        self.what, self.limit, self.given = what, limit, given
        super().__init__(f"{what}: limit is {limit}, have {given}")


class Unavailable(TandemError):
    """The service drains or failed. Maps to UNAVAILABLE."""


class ConfigError(TandemError):
    """A setting or a path given at start is wrong; fatal."""

    def __init__(self, field: str, problem: str, *, given: object) -> None:
        self.field, self.problem, self.given = field, problem, given
        super().__init__(f"{field}: {problem}, got {given!r}")


class CheckpointError(TandemError):
    """A checkpoint is incomplete, corrupted or of a kind that is not served; fatal at start."""

    def __init__(self, field: str, problem: str, *, given: object) -> None:
        self.field, self.given = field, given
        super().__init__(f"{field}: {problem}, got {given!r}")


class InvalidTensor(TandemError):
    """A tensor on the wire does not have the agreed type, shape or size."""

    def __init__(self, field: str, *, limit: object, given: object) -> None:
        self.field, self.limit, self.given = field, limit, given
        super().__init__(f"{field}: must be {limit}, got {given}")
