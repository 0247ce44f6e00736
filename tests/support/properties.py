"""How often property tests try: `make sweep`, which says so in the environment, tries more than `make test`."""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["SWEEPING", "examples"]

SWEEPING = os.environ.get("HYPOTHESIS_PROFILE") == "sweep"


def examples(few: int, *, many: int) -> settings:
    """Settings of a property test: ``few`` examples in `make test`, ``many`` in `make sweep`, always the same ones."""
    return settings(max_examples=many if SWEEPING else few, deadline=None, derandomize=True)
