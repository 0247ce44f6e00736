"""The settings of torch's CUDA allocator, as users write them in ``PYTORCH_CUDA_ALLOC_CONF``."""

from __future__ import annotations

import re
from dataclasses import replace

from graphopt.analysis.allocator.rules import CACHING, AllocatorRules

__all__ = ["rules_of_settings"]

_MIB = 2**20
_ITEM = re.compile(r"\s*([a-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[]*)(?:,|$)")


def rules_of_settings(text: str) -> AllocatorRules:
    """The rules that settings stand for; what does not decide where blocks are is passed over, and so is what is wrong.

    torch itself reads the same text when the process first uses a CUDA device, and refuses what is wrong there.

    Args:
        text: such as ``expandable_segments:True,max_split_size_mb:512``; empty for torch's defaults.

    Example:
        >>> from graphopt.analysis.allocator.allocator_settings import rules_of_settings
        >>> rules_of_settings("expandable_segments:True").expandable_segments
        True
    """
    rules = CACHING
    for name, value in _ITEM.findall(text):
        value = value.strip()
        if name == "expandable_segments":
            rules = replace(rules, expandable_segments=value == "True")
        elif name == "max_split_size_mb" and value.isdecimal():
            rules = replace(rules, max_split_size=int(value) * _MIB)
        elif name == "roundup_power2_divisions":
            rules = replace(rules, roundup_power2_divisions=_divisions(value))
    return rules


def _divisions(value: str) -> tuple[tuple[int, int], ...]:
    """One number for all requests, or ``[256:1,512:2,>:4]``: MiB and the divisions up to there, and above."""
    if value.isdecimal():
        return ((_MIB, int(value)),)
    pairs = [item.split(":") for item in value.strip("[]").split(",")]
    found: list[tuple[int, int]] = []
    start = _MIB
    for pair in pairs:
        if len(pair) != 2 or not pair[1].strip().isdecimal():
            return ()
        key, divisions = pair[0].strip(), int(pair[1])
        if key == ">":
            found.append((2 * start if found else start, divisions))
        elif key.isdecimal():
            start = int(key) * _MIB
            found.append((start, divisions))
        else:
            return ()
    return tuple(found)
