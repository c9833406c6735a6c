"""`python -m services.drafter`: settings, weights, one life of the service.

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
from services.drafter.config import DrafterSettings


def main() -> int:
    """Run the drafter; the exit status."""
    settings = load_settings_or_exit(DrafterSettings, "services.drafter")
    configure_log(settings.log_level, "drafter")
    get_log("drafter").info("configuration", **settings.effective())
    limit_spinning()
    # Imported here: `--help` and a wrong setting need not wait seconds for torch.
    from services.drafter.loading import load_drafter
    from services.drafter.service import serve

    try:
        return asyncio.run(serve(settings, load_drafter(settings)))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Ctrl-C while the weights load; later it drains.
        return 130


if __name__ == "__main__":
    leave(main())
