"""The command ``graphopt``, and ``python -m graphopt``."""

from __future__ import annotations

import sys

from graphopt.cli.interruption import end_at_once

__all__ = ["main"]


def main() -> int:
    """Run the command that the arguments of this process name."""
    end_at_once()  # before all other imports
    from graphopt.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
