"""`python -m services.drafter`: settings, weights, one life of the service.

Exit status: 0 after a clean stop, 1 after a failure, 2 for a wrong setting or checkpoint.
"""

from __future__ import annotations

import asyncio
import sys

from common.config import load_settings_or_exit
from common.errors import CheckpointError, ConfigError
from common.log import configure_log, get_log
from services.drafter.config import DrafterSettings


def main() -> int:
    """Run the service; the exit status."""
    # Before torch is imported: --help and a wrong setting answer at once.
    settings = load_settings_or_exit(DrafterSettings, "services.drafter")
    configure_log(settings.log_level, "drafter")
    get_log("drafter").info("configuration", **settings.model_dump())

    from services.drafter.service import load_model, serve

    try:
        model, facts = load_model(settings)
        return asyncio.run(serve(settings, model, facts))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
