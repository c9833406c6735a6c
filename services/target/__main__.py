"""`python -m services.target`: settings, logs, the model, then the service until it is told to stop.

Exit status 0 after a signal, 1 after a failure, 2 for a wrong setting or checkpoint.
"""

from __future__ import annotations

import asyncio
import sys

from common.config import load_settings_or_exit
from common.errors import TandemError
from common.lifecycle import leave
from common.log import configure_log, get_log
from common.spinning import limit_spinning
from services.target.config import TargetSettings


def main() -> int:
    """Run the target; the exit status."""
    settings = load_settings_or_exit(TargetSettings, "services.target")
    configure_log(settings.log_level, "target")
    get_log("target").info("configuration", **settings.effective())
    limit_spinning()
    # Imported here: `--help` and a wrong setting need not wait seconds for torch.
    from services.target.service import load_model, serve

    try:
        return asyncio.run(serve(settings, load_model(settings)))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Ctrl-C while the model loads; later it drains.
        return 130


if __name__ == "__main__":
    leave(main())
