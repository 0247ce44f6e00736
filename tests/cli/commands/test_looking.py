"""The command line where it shows things: filters of tensors, pictures of memory, exports, and data for machines."""

from __future__ import annotations

import json
import stat
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from graphopt.cli.target.output import JSON_SCHEMA
from graphopt.ir.words.written_units import format_bytes
from tests.support.command import RECOMPUTE, Command, target

SVG = "{http://www.w3.org/2000/svg}"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


# --- data for machines -----------------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "passes": ((), {"passes"}),
    "formats": ((), {"formats"}),
    "tensors": ((target("plain"),), {"title", "stage", "tensors", "left_out"}),
    "dump": ((target("plain"),), {"title", "stage", "nodes"}),
    "memory": ((target("plain"),), {"title", "stage", "passes", "program"}),
    "diff": ((target("plain"), "-p", RECOMPUTE), {"title", "stage", "passes", "diff"}),
    "compare": ((target("with_loss"), "-p", RECOMPUTE), {"title", "stage", "passes"}),
    "cache": ((), {"folder", "on", "entries"}),
    "profile": (("cpu",), {"device", "profile"}),
    "plan": ((target("plain"), "--cost", "a100-80gb"), {"title", "stage", "budgets"}),
    "advise": ((target("plain"), "--device", "a100-80gb"), {"pipeline", "machine", "step", "candidates"}),
    "view": ((target("plain"), "-o", "page.html"), {"title", "stage", "passes", "file", "bytes"}),
}


def commands_of(run: Command) -> set[str]:
    """The commands that ``--help`` lists."""
    _, _, rest = run("--help").out.partition("COMMAND\n")
    return {line.split()[0] for line in rest.split("\n") if line.startswith("    ") and line[4:5].isalpha()}


def test_every_command_is_below(run: Command) -> None:
    assert commands_of(run) == {*COMMANDS, "help", "completion"}


@pytest.mark.sweep(but=("passes", "formats", "cache", "profile"))
@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_speaks_json_with_a_schema(
    run: Command, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, keys = COMMANDS[command]
    outcome = run(command, *arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert "\x1b" not in outcome.out
    data = outcome.data
    assert isinstance(data, dict)
    assert next(iter(data)) == "schema"
    assert isinstance(data["schema"], int)
    assert data["schema"] >= 1
    assert command in ("dump", "plan") or data["schema"] == JSON_SCHEMA, "programs and plans have forms of their own"
    assert keys <= set(data)


@pytest.mark.sweep
def test_programs_after_each_pass_have_a_schema_each(run: Command) -> None:
    each = run("dump", target("plain"), "--after-each", "--json").data
    assert each["schema"] == JSON_SCHEMA
    assert all(entry["program"]["schema"] >= 1 for entry in each["snapshots"])


# --- tensors ---------------------------------------------------------------------------------------------------------


def rows(run: Command, *arguments: object) -> list[dict[str, Any]]:
    return run("tensors", target("plain"), "--json", *arguments).data["tensors"]


@pytest.mark.sweep
def test_match_is_a_pattern(run: Command) -> None:
    found = rows(run, "--match", "blocks.0", "--match", "blocks.2")
    assert [row["name"] for row in found] == ["blocks.0", "blocks.2"]
    assert rows(run, "blocks.0", "--match", "blocks.2") == found
    unknown = run("tensors", target("plain"), "--match", "block.0")
    assert unknown.code == 1
    assert "'block.0' names no tensor; did you mean 'blocks.0'" in unknown.err


@pytest.mark.sweep
def test_phase(run: Command) -> None:
    everything = rows(run)
    backward = rows(run, "--phase", "backward")
    assert backward == [row for row in everything if row["phase"] == "backward"]
    assert 0 < len(backward) < len(everything)
    wrong = run("tensors", target("plain"), "--phase", "backwards")
    assert (wrong.code, "invalid choice: 'backwards'" in wrong.err) == (2, True)
    none = run("tensors", target("plain"), "--phase", "update")
    assert (none.code, none.out) == (0, "0 tensors, 0 B\n")


@pytest.mark.sweep
def test_sort(run: Command) -> None:
    everything = rows(run)
    by_bytes = rows(run, "--sort", "bytes")
    assert by_bytes == sorted(everything, key=lambda row: -row["bytes"])
    assert by_bytes[0]["bytes"] > by_bytes[-1]["bytes"]
    assert rows(run, "--sort", "name") == sorted(everything, key=lambda row: row["name"])


@pytest.mark.sweep
def test_limit_counts_the_rest(run: Command) -> None:
    whole = run("tensors", target("plain"), "--sort", "bytes").out.splitlines()
    data = run("tensors", target("plain"), "--sort", "bytes", "--limit", "3", "--json").data
    assert [row["name"] for row in data["tensors"]] == [line.split()[0] for line in whole[1:4]]
    assert f"{data['left_out'] + 3} tensors, " in whole[-1]
    lines = run("tensors", target("plain"), "--sort", "bytes", "--limit", "3").out.splitlines()
    assert lines[-1] == f"and {data['left_out']} more, left out by --limit"
    assert lines[-2] == f"3 tensors, {format_bytes(sum(row['bytes'] for row in data['tensors']))}"


@pytest.mark.sweep
def test_checkpoints_are_sorted_and_limited_too(run: Command) -> None:
    data = run("tensors", target("plain"), "--checkpoints", "--sort", "bytes", "--limit", "2", "--json").data
    assert len(data["checkpoints"]) == 2
    assert data["left_out"] > 0
    assert data["checkpoints"][0]["bytes"] >= data["checkpoints"][1]["bytes"]
    text = run("tensors", target("plain"), "--checkpoints", "--limit", "2").out
    assert text.endswith(f"and {data['left_out']} more, left out by --limit\n")
    wrong = run("tensors", target("plain"), "--checkpoints", "--phase", "backward")
    assert (wrong.code, "--checkpoints are tensors of forward" in wrong.err) == (2, True)


def test_limit_has_to_be_a_number_above_0(run: Command) -> None:
    outcome = run("tensors", target("plain"), "--limit", "0")
    assert (outcome.code, "'0' is not a whole number above 0" in outcome.err) == (2, True)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_memory_as_svg(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    outcome = run("memory", target("plain"), "-p", RECOMPUTE, "--format", "svg", "-o", file)
    assert (outcome.code, outcome.out) == (0, "")
    assert f"{RECOMPUTE}: " in outcome.err
    root = ET.parse(file).getroot()
    both = run("memory", target("plain"), "-p", RECOMPUTE, "--json").data
    told = root.findtext(f"{SVG}desc") or ""
    assert f"peak {format_bytes(both['after']['peak_bytes'])} in " in told
    assert f"before: {format_bytes(both['before']['peak_bytes'])}" in told
    assert root.findtext(f"{SVG}title") == "Small, joint stage: predicted memory"


@pytest.mark.sweep
def test_memory_as_svg_without_passes_compares_nothing(run: Command) -> None:
    root = ET.fromstring(run("memory", target("plain"), "--format", "svg").out)
    assert "before:" not in (root.findtext(f"{SVG}desc") or "")


@pytest.mark.sweep
def test_memory_as_text_in_a_file(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "memory.txt"
    assert run("memory", target("plain"), "-o", file).code == 0
    assert file.read_text(encoding="utf-8") == run("memory", target("plain")).out


def test_memory_on_another_device_has_what_its_allocator_reserves(run: Command) -> None:
    text = run("memory", target("plain"), "--device", "h100-80gb").out
    assert "on h100-80gb in " in text
    assert "device      fits into " in text
    found = run("memory", target("plain"), "--device", "h100-80gb", "--json").data["program"]
    assert found["reserved"]["reserved_peak_bytes"] % 2**21 == 0
    assert found["reserved"]["reserved_peak_bytes"] >= found["reserved"]["allocated_peak_bytes"] >= found["peak_bytes"]


def converter(folder: Path, name: str, script: str) -> None:
    """A program of that name in a folder that is all there is on the path."""
    folder.mkdir()
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_memory_as_png_by_a_converter(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = tmp_path / "bin", tmp_path / "seen.svg"
    find = 'for last; do :; done; while [ "$1" != --output ]; do shift; done'
    make = "printf '\\211PNG\\r\\n\\032\\n' > \"$2\""
    converter(folder, "rsvg-convert", f'{find}; {make}; IFS=; while read -r l; do echo "$l"; done < "$last" > {seen}')
    monkeypatch.setenv("PATH", str(folder))
    file = tmp_path / "memory.png"
    outcome = run("memory", target("plain"), "--format", "png", "-o", file)
    assert (outcome.code, outcome.out) == (0, "")
    assert file.read_bytes() == PNG
    assert f"wrote {file} ({len(PNG)} bytes)" in outcome.err
    assert ET.parse(seen).getroot().tag == f"{SVG}svg"


def test_png_without_a_converter_or_with_one_that_fails(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.png"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    outcome = run("memory", target("plain"), "--format", "png", "-o", file)
    assert outcome.code == 1
    assert "a png needs one of rsvg-convert, inkscape" in outcome.err
    converter(tmp_path / "bin", "inkscape", "echo 'no such font' >&2; exit 3")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    outcome = run("memory", target("plain"), "--format", "png", "-o", file)
    assert outcome.code == 1
    assert "inkscape made no png (exit code 3): no such font" in outcome.err
    assert not file.exists()
    to_stdout = run("memory", target("plain"), "--format", "png")
    assert (to_stdout.code, "a png is no text: give a file with -o FILE" in to_stdout.err) == (2, True)


def test_two_formats_of_memory(run: Command) -> None:
    outcome = run("memory", target("plain"), "--json", "--format", "svg")
    assert (outcome.code, "two formats" in outcome.err) == (2, True)


# --- exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_dump_for_perfetto(run: Command) -> None:
    outcome = run("dump", target("step"), "-p", RECOMPUTE, "--format", "perfetto")
    assert outcome.code == 0
    trace = json.loads(outcome.out)
    calls = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in calls} == {"forward", "backward", "recompute", "update"}
    assert trace["otherData"]["passes"] == RECOMPUTE


def test_dump_for_model_explorer(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    assert run("dump", target("plain"), "--format", "model-explorer", "-o", file).code == 0
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["label"] == "Small, joint stage"
    assert {"forward/blocks/0/up", "backward/blocks/0/up"} <= {node["namespace"] for node in data["graphs"][0]["nodes"]}


@pytest.mark.parametrize("form", ["perfetto", "model-explorer", "svg"])
def test_one_file_holds_one_program(run: Command, form: str) -> None:
    outcome = run("dump", "x:y", "--after-each", "--format", form)
    assert (outcome.code, f"one {form} holds one program" in outcome.err) == (2, True)


# --- a budget --------------------------------------------------------------------------------------------------------

FITTED = ("--budget", "90%", "--cost", "a100-80gb")


@pytest.mark.sweep
def test_commands_that_show_a_program_fit_it_into_a_budget(run: Command, tmp_path: Path) -> None:
    data = run("memory", target("step"), *FITTED, "--json").data
    assert data["after"]["peak_bytes"] <= 0.9 * data["before"]["peak_bytes"]
    assert data["passes"][-1]["name"] == "fit-memory"
    page = tmp_path / "page.html"
    outcome = run("view", target("step"), "-p", "fuse-update", *FITTED, "--time-limit", 30, "-o", page)
    assert outcome.code == 0, outcome.err
    text = page.read_text(encoding="utf-8")
    assert "--passes fuse-update --budget 90% --cost a100-80gb --time-limit 30" in text
    assert '"frontier":{' in text
    assert "fit-memory" in run("diff", target("step"), *FITTED).out


def test_a_budget_is_given_once_and_options_of_its_search_with_it(run: Command) -> None:
    twice = run("view", target("step"), "-p", "fit-memory{budget=1MB}", *FITTED)
    assert (twice.code, "two budgets: give one of them" in twice.err) == (2, True)
    alone = run("dump", target("step"), "--cost", "roofline")
    assert (alone.code, "--cost is for the search of plans: give --budget too" in alone.err) == (2, True)
    nothing = run("diff", target("plain"))
    assert (nothing.code, "give -p/--passes, --config or -b/--budget" in nothing.err) == (2, True)
    wrong = run("view", target("step"), "--budget", "8 apples")
    assert (wrong.code, "8 apples" in wrong.err) == (2, True)
    both = run("memory", target("step"), *FITTED, "--remeasure")
    assert (both.code, "leave one out" in both.err) == (2, True)
