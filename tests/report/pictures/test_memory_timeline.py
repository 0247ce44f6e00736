"""The memory timeline as a picture, and the stacking that pictures are drawn from."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt import Program
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.pictures.memory_timeline import timeline_svg
from graphopt.report.text.memory_bands import CATEGORY_STYLES, HATCHES, bytes_by_category, columns, highest, sections
from tests.support.hostile import NAMES, hostile
from tests.support.properties import examples
from tests.support.training import Blocks, captured, next_token, recomputed

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT, TOP, BOTTOM = 84.0, 876.0, 100.0, 380.0


@pytest.fixture(scope="module")
def plain() -> Program:
    model = Blocks(2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return graphopt.capture(model, (torch.randint(0, 11, (4, 8)),), loss=next_token, optimizer=optimizer)


@pytest.fixture(scope="module")
def joint() -> Program:
    return captured(Blocks(2), torch.randint(0, 11, (4, 8)), loss=next_token)


def root_of(text: str) -> ET.Element:
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def words(root: ET.Element) -> str:
    return "\n".join(element.text or "" for element in root.iter(f"{SVG}text"))


def by_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in root.iter() if element.get("class") == name]


def points(path: str) -> list[tuple[float, float]]:
    """The corners of a path of M, H, V and L."""
    x = y = 0.0
    found = []
    for kind, numbers in re.findall(r"([MHVL])([-\d., ]+)", path):
        values = [float(number) for number in re.findall(r"-?[\d.]+", numbers)]
        if kind in "ML":
            x, y = values
        elif kind == "H":
            (x,) = values
        else:
            (y,) = values
        found.append((x, y))
    return found


# --- stacking --------------------------------------------------------------------------------------------------------


def test_categories_add_up_at_every_call(plain: Program, joint: Program) -> None:
    for program in (plain, joint, recomputed(joint, "blocks.*")):
        timeline = program.memory()
        series = bytes_by_category(timeline)
        assert [sum(sizes) for sizes in zip(*series.values(), strict=True)] == timeline.bytes
        for position in range(0, len(timeline.nodes), 37):
            found = {name: sizes[position] for name, sizes in series.items() if sizes[position]}
            assert found == timeline.categories_at(position)
        assert list(series) == [name for name in CATEGORY_STYLES if name in series]


def test_every_category_looks_different() -> None:
    assert len(set(CATEGORY_STYLES.values())) == len(CATEGORY_STYLES)
    assert {hatch for _, hatch in CATEGORY_STYLES.values()} - {""} == set(HATCHES)


def test_sections_cover_the_step_in_order(plain: Program) -> None:
    parts = sections(plain.memory())
    assert [part.name for part in parts] == ["forward", "backward", "update"]
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].start, parts[-1].end) == (0, len(plain.memory().nodes))


@given(st.integers(1, 40), st.data())
def test_columns_hold_every_call_once_and_the_highest_is_among_them(width: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=90))
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(sizes))]
    for node in nodes:
        node.meta["graphopt"] = graphopt.ir.node.NodeInfo(graphopt.Phase.FORWARD)
    timeline = MemoryTimeline(nodes, sizes, 0, [], [0] * len(sizes), {})
    (part,) = sections(timeline)
    found = columns(part, width)
    assert [call for column in found for call in column] == list(range(len(sizes)))
    assert len(found) <= width
    assert max(sizes[highest(timeline, column)] for column in found) == max(sizes)


# --- the picture -----------------------------------------------------------------------------------------------------


def test_the_outline_reaches_the_peak_where_the_mark_is(plain: Program) -> None:
    timeline = plain.memory()
    root = root_of(timeline.to_svg(title="Blocks"))
    (outline,) = by_class(root, "outline")
    corners = points(outline.get("d") or "")
    top = min(y for _, y in corners)
    (mark,) = by_class(root, "peak")
    (x, y), _ = points(mark.get("d") or "")
    assert y == top
    position = timeline.bytes.index(timeline.peak_bytes)
    assert x == pytest.approx(LEFT + (position + 0.5) / len(timeline.nodes) * (RIGHT - LEFT), abs=0.1)
    assert f"peak {format_bytes(timeline.peak_bytes)}" in words(root)
    assert f"op {position + 1:,} of {len(timeline.nodes):,}, in " in words(root)


def test_heights_are_to_scale(plain: Program) -> None:
    timeline = plain.memory()
    root = root_of(timeline_svg(timeline))
    (outline,) = by_class(root, "outline")
    corners = points(outline.get("d") or "")
    scale = (BOTTOM - min(y for _, y in corners)) / timeline.peak_bytes
    assert BOTTOM - corners[0][1] == pytest.approx(timeline.bytes[0] * scale, abs=0.2)
    assert BOTTOM - corners[-1][1] == pytest.approx(timeline.bytes[-1] * scale, abs=0.2)
    assert (corners[0][0], corners[-1][0]) == (LEFT, RIGHT)


def test_no_peak_is_lost_where_calls_outnumber_pixels(joint: Program) -> None:
    timeline = joint.memory()
    times = 4000 // len(timeline.nodes) + 1
    many = MemoryTimeline(
        timeline.nodes * times, [1000] * len(timeline.nodes) * times, 0, [], [0] * len(timeline.nodes) * times, {}
    )
    place = len(many.bytes) * 2 // 3
    many.bytes[place] = 2000
    many.temporaries[place] = 2000
    root = root_of(timeline_svg(many))
    (outline,) = by_class(root, "outline")
    (mark,) = by_class(root, "peak")
    assert min(y for _, y in points(outline.get("d") or "")) == points(mark.get("d") or "")[0][1]


def test_the_legend_says_the_bytes_at_the_peak(plain: Program) -> None:
    timeline = plain.memory()
    text = words(root_of(timeline_svg(timeline)))
    for name in bytes_by_category(timeline):
        assert f"{name}, {format_bytes(timeline.categories.get(name, 0))}" in text
    assert "before, in all" not in text


def test_before_is_drawn_over_after_part_by_part(joint: Program) -> None:
    before, after = joint.memory(), recomputed(joint, "blocks.*").memory()
    root = root_of(after.to_svg(before=before))
    line = next(element for element in by_class(root, "before") if element.find(f"{SVG}title") is not None)
    corners = points(line.get("d") or "")
    assert (corners[0][0], corners[-1][0]) == (LEFT, RIGHT)
    scale = (BOTTOM - points(by_class(root, "peak")[0].get("d") or "")[0][1]) / after.peak_bytes
    assert BOTTOM - min(y for _, y in corners) == pytest.approx(before.peak_bytes * scale, rel=0.01)
    position = before.bytes.index(before.peak_bytes)
    old = next(part for part in sections(before) if part.start <= position < part.end)
    new = next(part for part in sections(after) if part.name == old.name)
    place = new.start + (position - old.start) / old.size * new.size
    x = next(x for x, y in corners if y == min(y for _, y in corners))
    assert x == pytest.approx(LEFT + place / len(after.nodes) * (RIGHT - LEFT), abs=2)
    assert f"before: {format_bytes(before.peak_bytes)}" in words(root)
    assert "before, in all" in words(root)


def test_bytes_have_a_unit_and_round_marks(joint: Program) -> None:
    root = root_of(joint.memory().to_svg())
    assert "kB alive" in words(root)
    marks = [
        element.text or "" for element in root.iter(f"{SVG}text")
        if element.get("text-anchor") == "end" and float(element.get("x") or 0) == LEFT - 8
    ]  # fmt: skip
    values = [float(mark) for mark in marks]
    assert 4 <= len(values) <= 9
    assert values[0] == 0
    assert len({round(b - a, 6) for a, b in itertools.pairwise(values)}) == 1


def test_it_can_be_read_without_seeing_it_and_in_the_dark(plain: Program) -> None:
    timeline = plain.memory()
    text = timeline.to_svg(title="Blocks, step stage")
    root = root_of(text)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Blocks, step stage: predicted memory"
    told = root.findtext(f"{SVG}desc") or ""
    assert told.startswith(f"peak {format_bytes(timeline.peak_bytes)} in ")
    assert f"parameters {format_bytes(timeline.categories['parameters'])}" in told
    assert "prefers-color-scheme:dark" in text
    for name in bytes_by_category(timeline):
        assert not CATEGORY_STYLES[name][1] or f'id="got-{name.replace(" ", "-")}"' in text


def test_the_picture_is_small_and_needs_nothing_else(plain: Program) -> None:
    text = plain.memory().to_svg()
    assert len(text) < 100_000
    assert not re.search(r"(href|src)=|@import|url\((?!#)", text)


def test_a_program_without_calls() -> None:
    program = Program(fx.Graph(), "forward", [], [])
    program.graph.output(())
    root = root_of(program.memory().to_svg(before=program.memory()))
    assert "a program without ops" in words(root)


def test_hostile_names_are_only_text() -> None:
    program = hostile()
    root = root_of(program.memory().to_svg(before=program.memory(), title=program.title))
    assert not list(root.iter(f"{SVG}script"))
    assert not list(root.iter(f"{SVG}img"))
    assert "\u202e" not in ET.tostring(root, encoding="unicode")


@examples(15)
@given(st.text(max_size=60))
def test_any_title_gives_a_well_formed_file(title: str) -> None:
    program = Program(fx.Graph(), "forward", [], [])
    program.graph.output(())
    root_of(program.memory().to_svg(title=title))
    root_of(program.memory().to_svg(title=title + NAMES[0]))


def test_one_call() -> None:
    timeline = graphopt.capture(nn.ReLU(), (torch.randn(3),), stage="forward").memory()
    assert len(timeline.nodes) == 1
    assert "peak " in words(root_of(timeline.to_svg(before=timeline)))
