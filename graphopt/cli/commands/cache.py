"""``graphopt cache``: the captures that are kept beyond the process, why some were not found or kept, and their end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from graphopt.cli.arguments.exit_codes import UsageError, wrong_use
from graphopt.cli.target.output import print_json, print_report, print_text
from graphopt.errors import GraphoptError
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.runtime.stored.program_folder import (
    StoredEntry,
    clear,
    entries,
    find_entry,
    is_on,
    programs_folder,
    refusals,
)
from graphopt.runtime.stored.stored_sizes import describe_sizes, read_sizes

__all__ = ["cache"]


def cache(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: where there is no folder, or no single entry of that key.
    """
    folder = programs_folder()
    if folder is None:
        raise UsageError("there is no folder for a cache: set GRAPHOPT_CACHE")
    if options.key:
        with wrong_use():
            find_entry(folder, options.key)
    _ACTIONS[options.action](folder, options)


def _list(folder: Path, options: argparse.Namespace) -> None:
    found = [find_entry(folder, options.key)] if options.key else entries(folder)
    if options.json:
        print_json({"folder": str(folder), "on": is_on(), "entries": [_data(entry) for entry in found]})
        return
    rows: list[tuple[str, ...]] = [("key", "model", "passes", "sizes", "bytes", "captured in", "used")]
    rows += [_row(entry) for entry in found]
    total = sum(entry.bytes for entry in found)
    state = "" if is_on() else "; it is off here: GRAPHOPT_CACHE names no folder, or GRAPHOPT_CACHE_PROGRAMS is 0"
    count = counted(len(found), "captures")
    print_report(f"{folder}: {count}, {format_bytes(total)}{state}", "\n".join(aligned(rows)) if found else "")


def _row(entry: StoredEntry) -> tuple[str, ...]:
    data = _data(entry)
    if "problem" in data:
        return (entry.key[:12], data["problem"], "", "", format_bytes(entry.bytes), "", _ago(entry.used))
    seconds = f"{data['seconds']:.1f} s"
    passes = data["passes"] or "no passes"
    sizes = data["sizes"] or "fixed"
    return (entry.key[:12], data["model"], passes, sizes, format_bytes(entry.bytes), seconds, _ago(entry.used))


def _data(entry: StoredEntry) -> dict[str, Any]:
    """What is known of an entry; one that cannot be read says so."""
    known: dict[str, Any] = {"key": entry.key, "bytes": entry.bytes, "used": entry.used}
    try:
        header = entry.header()
        return known | {
            "model": header["title"].text(),
            "passes": header["pipeline"].text(100_000),
            "sizes": describe_sizes(read_sizes(header["sizes"])),
            "seconds": header["seconds"].number(),
            "why": header["why"].text(),
        }
    except GraphoptError as error:
        return known | {"problem": f"cannot be read: {error}"}


def _ago(moment: float) -> str:
    seconds = max(time.time() - moment, 0.0)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _explain(folder: Path, options: argparse.Namespace) -> None:
    if options.key:
        _explain_one(find_entry(folder, options.key), options)
        return
    found, refused = [_data(entry) for entry in entries(folder)], refusals(folder)
    if options.json:
        print_json({"entries": found, "refused": [{"model": title, "reason": reason} for title, reason in refused]})
        return
    lines = [f"{data['key'][:12]} {data.get('model', '?')}: {data.get('why') or data.get('problem')}" for data in found]
    print_report(
        "captured, and why nothing stored would do:\n" + "\n".join(f"  {line}" for line in lines or ["nothing"]),
        "not kept, and why:\n" + "\n".join(f"  {title}: {reason}" for title, reason in refused) if refused else "",
    )


def _explain_one(entry: StoredEntry, options: argparse.Namespace) -> None:
    header = entry.header()
    sections = {name: {key: text.text() for key, text in part.entries()} for name, part in header["key"].entries()}
    if options.json:
        print_json({**_data(entry), "depends_on": sections})
        return
    lines = [f"{entry.key} {header['title'].text()}: {header['why'].text()}", "it depends on (# stands for a digest):"]
    for name, part in sections.items():
        lines += [f"  {name}", *(f"    {key}: {text}" for key, text in part.items())]
    print_report("\n".join(lines))


def _clear(folder: Path, options: argparse.Namespace) -> None:
    removed = [find_entry(folder, options.key)] if options.key else entries(folder)
    freed = sum(entry.bytes for entry in removed)
    for entry in removed:
        entry.remove()
    if not options.key:
        clear(folder)
    if options.json:
        print_json({"removed": [entry.key for entry in removed], "bytes": freed})
    else:
        count = counted(len(removed), "captures")
        print_text(f"removed {count}, {format_bytes(freed)}")


def _path(folder: Path, options: argparse.Namespace) -> None:
    if options.json:
        print_json({"folder": str(folder), "on": is_on()})
    else:
        print_text(str(folder))


_ACTIONS = {"list": _list, "explain": _explain, "clear": _clear, "path": _path}
