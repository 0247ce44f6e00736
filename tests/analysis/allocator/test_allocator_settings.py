"""The text of torch's allocator settings, and the rules that it stands for."""

from __future__ import annotations

import pytest

from graphopt.analysis.allocator import CACHING
from graphopt.analysis.allocator.allocator_settings import rules_of_settings

MIB = 2**20


@pytest.mark.parametrize("text", ["", "garbage_collection_threshold:0.8", "backend:native", "max_split_size_mb:x", "?"])
def test_what_does_not_place_blocks_leaves_the_defaults(text: str) -> None:
    assert rules_of_settings(text) == CACHING


def test_several_settings_hold_together() -> None:
    rules = rules_of_settings("max_split_size_mb:512, expandable_segments:True,roundup_power2_divisions:8")
    assert rules.expandable_segments
    assert rules.max_split_size == 512 * MIB
    assert rules.roundup_power2_divisions == ((MIB, 8),)
    assert not rules_of_settings("expandable_segments:False").expandable_segments


def test_divisions_by_size() -> None:
    rules = rules_of_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:20")
    assert rules.roundup_power2_divisions == ((256 * MIB, 1), (512 * MIB, 2), (1024 * MIB, 4), (2048 * MIB, 8))
    assert rules.max_split_size == 20 * MIB
    assert rules_of_settings("roundup_power2_divisions:[a:1]").roundup_power2_divisions == ()
