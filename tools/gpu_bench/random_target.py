"""A target service with random weights of a named shape, for the bench: all else is the service's own.

    python -m tools.gpu_bench.random_target SHAPE --listen … [flags of services.target]

Exit statuses are those of services.target.
"""

from __future__ import annotations

import asyncio
import sys

from common.config import load_settings
from common.device import find_device
from common.errors import TandemError
from common.lifecycle import leave
from common.log import configure_log
from common.threads import confine_tensor_work
from common.wire import dtype_from_name
from services.target.config import TargetSettings
from services.target.service import serve
from tools.gpu_bench.pair import check_shape, random_target


def main(argv: list[str]) -> int:
    """Run it; the exit status."""
    try:
        shape, *flags = argv
        check_shape(shape)
        settings = load_settings(TargetSettings, "tools.gpu_bench.random_target", ["--model", shape, *flags])
        configure_log(settings.log_level, "target")
        confine_tensor_work()
        dtype = dtype_from_name(settings.dtype_name)
        weights = random_target(shape, dtype, find_device(settings.device, dtype))
        return asyncio.run(serve(settings, weights))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
