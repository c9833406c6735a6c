"""A drafter service with random weights of a named shape, for the bench: all else is the service's own.

    python -m tools.gpu_bench.random_drafter SHAPE --listen … [flags of services.drafter]

Exit statuses are those of services.drafter.
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
from services.drafter.config import DrafterSettings
from services.drafter.loading import LoadedDrafter, drafter_on_gpu
from services.drafter.service import serve
from tools.gpu_bench.pair import check_shape, random_draft, random_shared


def load_random(settings: DrafterSettings, shape: str) -> LoadedDrafter:
    """The drafter that fits the bench's random target of this shape."""
    check_shape(shape)
    confine_tensor_work()
    dtype = dtype_from_name(settings.dtype_name)
    shared, target = random_shared(shape, dtype, find_device(settings.device, dtype))
    return drafter_on_gpu(settings, random_draft(shape, shared, target), shared, target)


def main(argv: list[str]) -> int:
    """Run it; the exit status."""
    try:
        shape, *flags = argv
        named = ["--model", shape, "--target-model", shape]
        settings = load_settings(DrafterSettings, "tools.gpu_bench.random_drafter", [*named, *flags])
        configure_log(settings.log_level, "drafter")
        return asyncio.run(serve(settings, load_random(settings, shape)))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
