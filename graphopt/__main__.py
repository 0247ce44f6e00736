"""The command ``graphopt``, and ``python -m graphopt``."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command that the arguments of this process name."""
    try:
        from graphopt.cli.interruption import end_at_once

        end_at_once()
    except KeyboardInterrupt:  # which from here on is seen to
        os.write(2, b"graphopt: interrupted\n")
        os._exit(130)
    from graphopt.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
