"""The form of a device in settings and options. No torch: whether it is there is asked by common.device."""

from __future__ import annotations

import re

from common.errors import ConfigError

_FORM = re.compile(r"cpu|cuda(:[0-9]{1,2})?")


def check_device_name(text: str) -> None:
    """ConfigError for `device` unless it is cpu, cuda or cuda:N."""
    if not _FORM.fullmatch(text):
        raise ConfigError("device", "must be cpu, cuda or cuda:N", given=text)
