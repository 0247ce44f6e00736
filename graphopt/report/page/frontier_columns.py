"""The plans that a pass could have carried out, as columns for the budget slider."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt.report.page.records import Strings
from graphopt.report.page.story import Story

__all__ = ["frontier_json"]


def frontier_json(story: Story, numbers: list[dict[fx.Node, int]], strings: Strings) -> dict[str, Any] | None:
    """The frontier of the last pass that searched one; None where none did.

    Beside what the pass tells (``graphopt.rewriting.memory.fit.summary``) it says which snapshot is planned, with
    tensors by their records there and texts by number; seconds of calls are nanoseconds, in the snapshot's order.

    Args:
        story: what the page shows.
        numbers: the record of each node of each snapshot.
        strings: where texts go.
    """
    for index in range(len(story.snapshots) - 1, 0, -1):
        record = story.snapshots[index].record
        tell = None if record is None else record.changed.details.get("frontier")
        if tell is not None and story.previous(index) is not None:
            return _columns(tell(), index - 1, numbers[index - 1], strings)
    return None


def _columns(told: dict[str, Any], planned: int, number: dict[fx.Node, int], strings: Strings) -> dict[str, Any]:
    records = {node.name: record for node, record in number.items()}
    tensors = told["tensors"]
    return {
        **told,
        "snapshot": planned,
        "tensors": {
            "name": [strings(name) for name in tensors["name"]],
            "record": [records[node] for node in tensors["node"]],
            "bytes": tensors["bytes"],
            "seconds": tensors["seconds"],
        },
        "calls": [round(seconds * 1e9) for seconds in told["calls"]],
    }
