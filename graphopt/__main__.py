"""``python -m graphopt``: the same as the command ``graphopt``."""

from __future__ import annotations

import sys

from graphopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
