"""Everything that a page shows, as plain data for its scripts."""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx

from graphopt.analysis.liveness import storages_of
from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.provided.formats import Format, available_formats
from graphopt.report.page.changes import text_diffs
from graphopt.report.page.frontier_columns import frontier_json
from graphopt.report.page.kept import activations, activations_json, last_readers
from graphopt.report.page.lineage import Difference, Lineage, follow
from graphopt.report.page.pass_rows import passes_json, sentence
from graphopt.report.page.records import PHASES, REFERENCE, Records, Strings, runs
from graphopt.report.page.sheet import LANES, Sheet, set_out
from graphopt.report.page.story import ALL_PASSES, STAGE_NAMES, Story
from graphopt.report.page.timeline_columns import timeline_json
from graphopt.report.page.tree import Item
from graphopt.report.pictures.visits import Placement
from graphopt.rewriting.dump import environment

__all__ = ["PAGE_SCHEMA", "page_data"]

PAGE_SCHEMA = 3
"""The version of the data's layout."""


def page_data(story: Story) -> dict[str, Any]:
    """All data of a page.

    Args:
        story: what it shows.

    Returns:
        plain data for JSON. Texts are numbers into ``strings``, except where there are few of them; nodes are numbers
        into ``records``; all sizes are bytes.
    """
    programs = [snapshot.program for snapshot in story.snapshots]
    lineages = _lineages(story)
    sheet = set_out(programs, lineages)
    strings = Strings()
    records = Records(strings)
    numbers = [records.add(program, places) for program, places in zip(programs, sheet.places, strict=True)]
    timelines = _timelines(story)
    shown = {
        name: timeline_json(timelines[index], numbers[index], strings, measured=measured)
        for name, index, measured in _compared(story)
    }
    after = programs[story.after]
    peaks = (
        None if after.stage == "forward" else (timelines[story.before].peak_bytes, timelines[story.after].peak_bytes)
    )
    pair = [(sheet.placements[index], timelines[index]) for index in (story.before, story.after)]
    snapshots = _snapshots(story, lineages, numbers, sheet, timelines)
    return {
        "schema": PAGE_SCHEMA,
        "title": after.title or "program",
        "sentence": sentence(story, peaks),
        "stage": after.stage,
        "stage_names": STAGE_NAMES,
        "passes": passes_json(story),
        "timelines": shown,
        "snapshots": snapshots,
        "before": story.before,
        "after": story.after,
        "first_shown": len(snapshots) - 1,
        "sheet": _sheet_json(sheet, strings),
        "phases": [phase.value for phase in PHASES],
        "reference": REFERENCE,
        "diffs": [found.to_json(strings) for found in text_diffs(story)],
        "activations": activations_json(activations(*pair), numbers[story.before] | numbers[story.after]),
        "frontier": frontier_json(story, numbers, strings),
        "environment": environment(),
        "pipeline": story.pipeline,
        "command": story.command,
        "formats": [{"name": form.name, "suffix": form.suffix, "help": form.help} for form in _formats()],
        "records": records.to_json(),
        "strings": strings.table,
    }


def _formats() -> list[Format]:
    """The formats that a program can be written in, the page aside."""
    return [form for form in available_formats().values() if form.name != "html"]


def _compared(story: Story) -> list[tuple[str, int, int | None]]:
    """The two programs whose timelines are shown, or the one where there are no others."""
    after = ("after", story.after, story.measured.after)
    return [after] if story.before == story.after else [("before", story.before, story.measured.before), after]


def _timelines(story: Story) -> dict[int, MemoryTimeline]:
    return {index: story.snapshots[index].program.memory() for index in {story.before, story.after}}


def _lineages(story: Story) -> dict[str, Lineage]:
    """For each stage, which nodes of its snapshots are the same."""
    stages: dict[str, list[int]] = {}
    for index, snapshot in enumerate(story.snapshots):
        stages.setdefault(snapshot.program.stage, []).append(index)
    return {
        stage: follow(
            [story.snapshots[index].program for index in indices],
            [story.snapshots[index].record is None for index in indices],
        )
        for stage, indices in stages.items()
    }


def _snapshots(
    story: Story,
    lineages: dict[str, Lineage],
    numbers: list[dict[fx.Node, int]],
    sheet: Sheet,
    timelines: dict[int, MemoryTimeline],
) -> list[dict[str, Any]]:
    """The programs in order; behind them, the last one once more with what all passes together did to it."""
    differences = [found for lineage in lineages.values() for found in lineage.differences]
    shown = []
    passes = itertools.count()
    for index, snapshot in enumerate(story.snapshots):
        number = numbers[index]
        difference, previous = differences[index], story.previous(index)
        refers = timelines[index].refers if index in timelines else storages_of(snapshot.program)[1]
        shown.append(
            {
                "label": snapshot.label,
                "stage": snapshot.program.stage,
                "program": index,
                "pass": None if snapshot.record is None else next(passes),
                "nodes": runs(number.values()),
                "changes": None
                if difference is None or previous is None
                else _changes(difference, number, numbers[previous]),
                "kept": _kept(sheet.placements[index], refers, number),
            }
        )
    if story.compares_all:
        lineage = lineages[story.snapshots[story.after].program.stage]
        difference = lineage.between(0, -1)
        changes = _changes(difference, numbers[story.after], numbers[story.before])
        shown.append({**shown[story.after], "label": ALL_PASSES, "pass": None, "changes": changes})
    return shown


def _changes(difference: Difference, new: dict[fx.Node, int], old: dict[fx.Node, int]) -> dict[str, list[int]]:
    """Runs of records; those of erased ops are of the program that is compared with."""
    return {
        "created": runs(new[node] for node in difference.created),
        "erased": runs(old[node] for node in difference.erased),
        "moved": runs(new[node] for node in difference.moved),
        "rewired": runs(new[node] for node in difference.rewired),
    }


def _kept(
    placement: Placement, refers: dict[fx.Node, list[Storage]], number: dict[fx.Node, int]
) -> dict[str, list[int]]:
    """What forward keeps for backward, as columns: the record that makes it, its bytes, the record that reads it."""
    found = last_readers(placement, refers)
    return {
        "record": [number[storage.owner] for storage, _ in found],
        "bytes": [storage.bytes for storage, _ in found],
        "reader": [number[reader] for _, reader in found],
    }


def _sheet_json(sheet: Sheet, strings: Strings) -> dict[str, Any]:
    """Rows, columns and the tree around them; ``slots`` are triples of row, column and number of places."""
    return {
        "lanes": [lane.value for lane in LANES],
        "rows": [strings(visit.path) for visit in sheet.visits],
        "tree": [_item_json(item, strings) for item in sheet.tree],
        "slots": {
            stage: [number for (row, lane), count in slots.items() for number in (row, lane, count)]
            for stage, slots in sheet.slots.items()
        },
    }


def _item_json(item: Item, strings: Strings) -> list[Any]:
    """``[label, path, kind, first row, one past the last, children]``."""
    children = [_item_json(child, strings) for child in item.children]
    return [strings(item.label), strings(item.path), item.kind, *item.rows, children]
