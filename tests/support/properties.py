"""How often property tests try: `make sweep`, which says so in the environment, tries more than `make test`."""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["SWEEPING", "examples"]

SWEEPING = os.environ.get("HYPOTHESIS_PROFILE") == "sweep"
TIMES = 10
"""How many times as many examples a sweep tries."""


def examples(few: int) -> settings:
    """Settings of a property test: ``few`` examples, in `make sweep` ``TIMES`` as many; always the same ones."""
    return settings(max_examples=TIMES * few if SWEEPING else few, deadline=None, derandomize=True)
