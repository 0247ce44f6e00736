"""The interactive page in a real browser: what it says is what the program says, whatever one clicks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser
from torch import fx, nn

import graphopt
from graphopt import Phase, Pipeline, Program
from graphopt.capture import CaptureSession
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.page import MeasuredPeaks, Story, page_of_story, story_of_snapshots
from graphopt.report.page.kept import kept_storages
from graphopt.report.page.story import STAGE_NAMES
from graphopt.report.pictures.visits import Placement, merge_visits
from graphopt.runtime.programs.rewrite import rewrite
from tests.support.browser import SIZES, Opened, opened
from tests.support.training import Blocks, next_token

LAYERS = 3
PASSES = "recompute{checkpoints=blocks.*},fuse-update"
MEASURED = MeasuredPeaks(before=54_321, after=12_345)


@pytest.fixture(scope="module")
def story() -> Story:
    """A whole step of a small model with dropout, after a pass of the joint stage and one of the step stage."""
    torch.manual_seed(0)
    model = Blocks(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    session = CaptureSession(model, (torch.randint(0, 11, (2, 6)),), None, loss=next_token, optimizer=optimizer)
    result = rewrite(session, Pipeline(PASSES), until="step")
    return story_of_snapshots(result.snapshots, result.records, measured=MEASURED, command="graphopt view a.py:b")


@pytest.fixture(scope="module")
def file(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "step page.html"
    path.write_text(page_of_story(story), encoding="ascii")
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Opened]:
    with opened(browser, file) as found:
        yield found


def programs(story: Story) -> tuple[Program, Program]:
    return story.snapshots[story.before].program, story.snapshots[story.after].program


def named_nodes(program: Program) -> dict[str, fx.Node]:
    """The first node that has each of the names for users."""
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    return {name: node for node in reversed(nodes) for name in info(node).names}


def placed(program: Program) -> Placement:
    placement = Placement(program)
    placement.place(merge_visits([placement.order]))
    return placement


# --- passes and the sentence -----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_the_sentence_and_the_table_say_what_the_records_say(page: Opened, story: Story) -> None:
    before, after = (format_bytes(program.memory().peak_bytes) for program in programs(story))
    assert f"predicted peak {before} → {after}" in page.text("#sentence")
    assert "measured above persistent memory: before 54.3 kB, after 12.3 kB" in page.text("#sentence")
    rows = page.table("#passes-table")
    assert len(rows) == len(story.records) == 2
    for cells, record in zip(rows, story.records, strict=True):
        assert cells[0].startswith(record.name)
        assert cells[1:3] == [STAGE_NAMES[record.stage], str(record.changed)]
        at = next(i for i, snapshot in enumerate(story.snapshots) if snapshot.record is record)
        ops = [len(list(story.snapshots[i].program.memory().nodes)) for i in (at - 1, at)]
        assert cells[3] == f"{ops[0]:,} → {ops[1]:,}"
        assert cells[4] == f"{format_bytes(record.peak_before or 0)} → {format_bytes(record.peak_after or 0)}"
        assert cells[6] == record.numerics
        assert all(line in cells[7] for line in record.changed.lines)
    heads = page.table("#passes-table", "thead")[0]
    assert "peak (predicted)" in heads
    assert "took (measured)" in heads
    assert "checkpoints=blocks.*" in rows[0][0]


@pytest.mark.sweep
def test_predicted_and_measured_peaks_stand_apart(page: Opened, story: Story) -> None:
    after = programs(story)[1].memory()
    caption = page.text("#chart-after figcaption")
    assert f"above persistent memory {format_bytes(after.allocated_peak_bytes)} predicted, 12.3 kB measured" in caption


# --- memory ----------------------------------------------------------------------------------------------------------


def alive_on(page: Opened) -> list[tuple[str, str, str]]:
    more = page.page.locator("#moment-alive .link", has_text="more")
    if more.count():
        more.click()
    return [(name, size, category) for name, size, category, _ in page.table("#moment-alive")]


def assert_moment(page: Opened, program: Program, position: int) -> None:
    timeline = program.memory()
    expected = [(item.name, format_bytes(item.bytes), item.category) for item in timeline.alive_at(position)]
    assert alive_on(page) == expected
    head = page.text("#moment-head")
    assert f"op {position + 1:,} of {len(timeline.nodes):,}, in {info(timeline.nodes[position]).phase}" in head
    assert f"{format_bytes(timeline.bytes[position])} alive" in head
    shown = {name: size for name, size, _ in page.table("#moment-categories")}
    assert shown == {name: format_bytes(size) for name, size in timeline.categories_at(position).items()}
    assert page.table("#moment-categories", "tfoot")[0][1] == format_bytes(timeline.bytes[position])


@pytest.mark.sweep
def test_the_page_opens_at_the_peak(page: Opened, story: Story) -> None:
    timeline = programs(story)[1].memory()
    assert_moment(page, programs(story)[1], timeline.bytes.index(timeline.peak_bytes))
    assert "the peak" in page.text("#moment-head")
    assert f"peak {format_bytes(timeline.peak_bytes)}" in page.text("#chart-after figcaption")


@pytest.mark.sweep
def test_keys_select_moments(page: Opened, story: Story) -> None:
    before, after = programs(story)
    number = len(before.memory().nodes)
    canvas = page.show("#chart-before canvas")
    for key, position in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("Shift+ArrowRight", 11),
        ("ArrowLeft", 10),
        ("End", number - 1),
    ):
        canvas.press(key)
        assert_moment(page, before, position)
    canvas.press("ArrowRight")
    assert_moment(page, before, number - 1)
    page.show("#chart-after canvas").press("p")
    timeline = after.memory()
    assert_moment(page, after, timeline.bytes.index(timeline.peak_bytes))


def test_a_click_selects_a_moment_and_a_name_leads_to_its_call(page: Opened, story: Story) -> None:
    before = programs(story)[0]
    box = page.show("#chart-before canvas").bounding_box()
    assert box is not None
    page.page.mouse.click(box["x"] + 66 + (box["width"] - 74) / 2, box["y"] + 100)
    head = page.text("#moment-head")
    position = int(head.split(": op ")[1].split(" of")[0].replace(",", "")) - 1
    assert abs(position - len(before.memory().nodes) / 2) < 5
    assert_moment(page, before, position)
    nodes = named_nodes(before)
    name = next(item.name for item in before.memory().alive_at(position) if item.category == "activations")
    page.page.locator("#moment-alive .link", has_text=name).first.click()
    assert page.ask("selected") == nodes[name].name
    assert page.text("#details h3") == name
    assert f"{story.before + 1} of {len(story.snapshots) + 1}" in page.text("#snapshot")


def test_what_is_clicked_opens_under_its_name(page: Opened, story: Story) -> None:
    timeline = programs(story)[1].memory()
    nodes = named_nodes(programs(story)[1])
    owners = {storage.names[0]: storage.owner for storage in timeline.storages if storage.names}
    alive_on(page)
    shared = 0
    alive = page.page.locator("#moment-alive .link").all_inner_texts()
    for name in alive[:: max(1, len(alive) // 24)]:
        if name not in nodes:
            continue  # temporaries, and what has no name for users
        page.page.locator("#moment-alive").get_by_text(name, exact=True).first.click()
        assert page.text("#details h3") == name
        told = page.details().get("shares memory with", "")
        assert told == ("" if owners[name] is nodes[name] else owners[name].name)
        shared += bool(told)
    assert shared > 0
    assert "all passes" in page.text("#snapshot"), "the picture of this program stays"


# --- the picture -----------------------------------------------------------------------------------------------------


def test_search_and_click_show_a_calls_facts(page: Opened, story: Story) -> None:
    after = programs(story)[1]
    tensor = next(t for t in after.tensors if t.name == "blocks.1.qkv")
    page.find("blocks.1.qkv")
    assert page.ask("selected") == tensor.node
    node = next(node for node in after.graph.nodes if node.name == tensor.node)
    shown = page.details()
    names = [page.text("#details h3"), *shown["also called"].split(", ")]
    assert names == ["blocks.1.qkv", *(n for n in (*info(node).names, node.name) if n != "blocks.1.qkv")]
    assert shown["type"] == type_text(value_of(node))
    assert shown["bytes"].startswith("0: a view" if not tensor.bytes else format_bytes(tensor.bytes))
    assert shown["phase"] == "forward"
    assert shown["module"] == "blocks.1.qkv"
    assert shown["source"] == info(node).source
    assert shown["made by"] == "capture"
    assert f"users ({len(node.users)})" in shown
    (source,) = node.all_input_nodes
    assert source.name in shown["call"]
    page.click_node(source.name)
    assert page.ask("selected") == source.name
    assert page.details()["bytes"].startswith(
        f"{format_bytes(next(t.bytes for t in after.tensors if t.node == source.name))} ("
    )


@pytest.mark.sweep
def test_users_and_arguments_are_links(page: Opened, story: Story) -> None:
    after = programs(story)[1]
    page.find("blocks.0::add")
    node = next(node for node in after.graph.nodes if node.name == page.ask("selected"))
    user = next(iter(node.users))
    page.page.locator("#details ul .link", has_text=user.name).first.click()
    assert page.ask("selected") == user.name


@pytest.mark.sweep
def test_hovering_marks_a_call_and_says_what_it_is(page: Opened) -> None:
    page.find("head")
    name = page.ask("selected")
    page.show("#graph").press("Escape")
    assert page.ask("selected") is None
    place = page.ask("place", name)
    plain = page.page.locator("#graph").screenshot()
    page.page.mouse.move(place["x"], place["y"])
    assert page.ask("hovered") == name
    assert page.text("#hovered").startswith("head")
    page.ask("draw")
    assert page.page.locator("#graph").screenshot() != plain


def test_equal_blocks_are_drawn_once_until_they_are_opened(page: Opened) -> None:
    closed = page.ask("bands")
    group = next(label for label, _ in closed if "…" in label)
    assert sum(label == "qkv" for label, _ in closed) < LAYERS
    page.show("#graph")
    place = page.ask("label", group)
    assert place["open"]
    # the badge stands behind the label
    page.page.mouse.click(place["x"] + 12 + len(group) * 7, place["y"])
    opened_all = page.ask("bands")
    assert len(opened_all) > len(closed)
    page.page.click("#close-all")
    assert page.ask("bands") == closed
    place = page.ask("label", group)
    page.page.mouse.click(place["x"], place["y"])
    assert len(page.ask("bands")) < len(closed)
    page.page.click("#open-all")
    assert sum(label == "qkv" for label, _ in page.ask("bands")) == LAYERS
    assert {kind for _, kind in page.ask("bands")} == {"head", "calls"}


def test_the_slider_tells_what_a_pass_did_and_nothing_moves(page: Opened, story: Story) -> None:
    index = next(i for i, s in enumerate(story.snapshots) if s.record and s.record.name == "recompute")
    old, new = (story.snapshots[i].program for i in (index - 1, index))
    names = [{node.name for node in program.graph.nodes if node.op == "call_function"} for program in (old, new)]
    page.page.click("#open-all")
    page.slide(index - 1)
    places = page.places(names[0])
    page.slide(index)
    assert f"{index + 1} of {len(story.snapshots) + 1} · forward + backward graph" in page.text("#snapshot")
    changes = page.ask("changes")
    assert set(changes["created"]) == names[1] - names[0]
    assert set(changes["erased"]) == names[0] - names[1]
    again = {node.name for node in new.phase_nodes(Phase.RECOMPUTE)}
    assert again
    assert again <= set(changes["created"])
    told = page.text("#changed")
    assert (
        f"+ {len(changes['created'])} created, − {len(changes['erased'])} erased, ↕ {len(changes['moved'])} moved"
        in told
    )
    assert page.places(names[0]) == places
    assert len({tuple(place) for place in page.places(names[0] | names[1]).values()}) == len(names[0] | names[1])


@pytest.mark.sweep
def test_a_moved_call_is_told_from_a_new_one(page: Opened, story: Story) -> None:
    page.slide(story.after)
    changes = page.ask("changes")
    kinds = [set(changes[kind]) for kind in ("created", "erased", "moved", "rewired")]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    old, new = (story.snapshots[i].program for i in (story.after - 1, story.after))
    both = {node.name for node in old.graph.nodes} & {node.name for node in new.graph.nodes}
    assert kinds[2] <= both


def test_the_picture_opens_with_all_that_passes_did(page: Opened, story: Story) -> None:
    old, new = programs(story)
    names = [{node.name for node in program.graph.nodes if node.op == "call_function"} for program in (old, new)]
    assert "all passes" in page.text("#snapshot")
    assert "compared with the program without passes" in page.text("#changed")
    changes = page.ask("changes")
    again = {node.name for node in new.phase_nodes(Phase.RECOMPUTE)}
    assert again
    assert again <= set(changes["created"]), "what an earlier pass made counts, too"
    assert len(changes["created"]) - len(changes["erased"]) == len(names[1]) - len(names[0])


# --- changes, activations, build -------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_the_diffs_are_the_programs_diffs(page: Opened, story: Story) -> None:
    expected = [programs(story)[0].diff(programs(story)[1]).splitlines()]
    for index, snapshot in enumerate(story.snapshots):
        if snapshot.record is not None:
            expected.append(story.snapshots[index - 1].program.diff(snapshot.program).splitlines())
    blocks = page.page.locator("#diffs > details").all()
    for block, lines in zip(blocks, expected, strict=True):
        assert lines[0] in block.inner_text()
        block.locator("summary").click()
        block.locator(".hunks").wait_for()
        assert not block.locator("pre").count(), "hunks of a long diff are folded"
        assert block.locator(".hunk").count() == sum(line.startswith("@@") for line in lines)
        block.locator(".hunks > button").click()
        block.locator(".hunk[open] pre").last.wait_for()
        body = [line for line in lines[1:] if not line.startswith(("@@", "---", "+++"))]
        shown = block.locator("pre span").all_inner_texts()
        assert [line.rstrip() for line in shown] == [line.rstrip() for line in body], "and none of them is left out"


@pytest.mark.sweep
def test_activations_are_sorted_by_any_column(page: Opened) -> None:
    rows = page.table("#activations-table")
    page.show("#activations-table")
    page.page.locator("#activations-table th button", has_text="×").click()
    counts = [int(cells[1]) for cells in page.table("#activations-table")]
    assert counts == sorted((int(cells[1]) for cells in rows), reverse=True)
    page.page.locator("#activations-table th button", has_text="tensor").click()
    names = [cells[0] for cells in page.table("#activations-table")]
    assert names == sorted(cells[0] for cells in rows)
    folded = next(cells[0] for cells in rows if cells[0].startswith("blocks.*."))
    page.page.locator("#activations-table .link", has_text=folded).first.click()
    assert page.text("#details h3").startswith(folded.replace("*", "0"))


@pytest.mark.sweep
def test_the_passes_and_the_command_can_be_copied(page: Opened, story: Story) -> None:
    assert page.page.locator("#build pre").all_inner_texts() == [story.pipeline, "graphopt view a.py:b"]
    assert story.pipeline == PASSES
    environment, formats = page.page.locator("#build dl").all_inner_texts()
    assert graphopt.__version__ in environment
    assert torch.__version__ in environment
    assert "model-explorer" in formats
    page.show("#build pre")
    page.page.locator("#build button").first.click()
    page.page.locator("#build button", has_text="Cop").first.wait_for()


# --- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_program_without_calls_has_a_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "empty.html"
    file.write_text(graphopt.capture(nn.Identity(), (torch.zeros(2),), stage="forward").to_html(), encoding="ascii")
    with opened(browser, file) as page:
        assert "of 0 ops; as captured, without passes" in page.text("#sentence")
        assert page.text("#moment-head") == "No ops; 8 B are persistent."
        page.show("#graph").press("j")
        page.find("args")
        assert page.details()["phase"].startswith("input: input")


def test_sizes_that_vary_are_written_as_they_are_called(browser: Browser, tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    program = graphopt.capture(nn.Linear(4, 2), (torch.zeros(8, 4),), dynamic_shapes=shapes)
    (symbol,) = (str(value_of(n).shape[0]) for n, s in program.inputs_of("input"))
    file = tmp_path / "varies.html"
    file.write_text(program.to_html(), encoding="ascii")
    with opened(browser, file) as page:
        page.find("args[0]")
        assert page.details()["type"] == f"f32[{symbol}, 4]"
        assert page.details()["bytes"] == "128 B (128 bytes)"


# --- how it looks ----------------------------------------------------------------------------------------------------


def colour(page: Opened) -> str:
    return page.page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.sweep
def test_dark_follows_the_system_and_the_button(browser: Browser, file: Path) -> None:
    with opened(browser, file) as page:
        assert colour(page) == "rgb(255, 255, 255)"
        light = page.page.locator("#graph").screenshot()
        page.page.click("#theme")
        assert colour(page) == "rgb(255, 255, 255)"
        page.page.keyboard.press("d")
        assert colour(page) == "rgb(13, 17, 23)"
        assert page.page.locator("#graph").screenshot() != light
        assert page.text("#theme") == "Theme: dark"
    with opened(browser, file, dark=True) as page:
        assert colour(page) == "rgb(13, 17, 23)"
        page.page.emulate_media(color_scheme="light")
        page.page.wait_for_selector("html:not([data-dark])")
        assert colour(page) == "rgb(255, 255, 255)"


@pytest.mark.sweep(but=("size0",))
@pytest.mark.parametrize("size", SIZES)
def test_nothing_sticks_out_at_any_size(browser: Browser, file: Path, size: tuple[int, int]) -> None:
    with opened(browser, file, size=size) as page:
        assert page.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        canvas = page.page.locator("#graph").bounding_box()
        assert canvas is not None
        assert canvas["width"] > 0.6 * min(size[0], 1300)
        assert canvas["height"] <= size[1]


def test_it_prints(browser: Browser, file: Path) -> None:
    with opened(browser, file, dark=True) as page:
        pdf = page.page.pdf(format="A4")
        assert pdf.startswith(b"%PDF")
        page.page.emulate_media(media="print")
        assert not page.page.locator("nav").is_visible()
        assert page.page.locator("#passes-table").is_visible()


def test_keys_move_and_zoom_the_picture(page: Opened) -> None:
    page.page.click("#open-all")
    page.show("#graph").focus()
    place = page.ask("place", "embedding")
    page.page.keyboard.press("Shift+ArrowDown")
    moved = page.ask("place", "embedding")
    assert moved["world"] == place["world"]
    assert moved["y"] != place["y"]
    page.page.keyboard.press("-")
    assert page.ask("place", "embedding") != moved
    page.page.keyboard.press("j")
    first = page.ask("selected")
    page.page.keyboard.press("j")
    page.page.keyboard.press("k")
    assert page.ask("selected") == first
    page.page.keyboard.press("Escape")
    assert page.ask("selected") is None
    page.page.keyboard.press("?")
    assert page.page.locator("#help").is_visible()


@pytest.mark.sweep
def test_keys_step_through_the_modules_and_fold_them(page: Opened) -> None:
    page.show("#graph").focus()
    rows = [label for label, _ in page.ask("bands")]
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowDown")
    assert page.ask("current") == rows[1]
    group = next(i for i, label in enumerate(rows) if "…" in label)
    for _ in range(group - 1):
        page.page.keyboard.press("ArrowDown")
    assert page.ask("current") == rows[group]
    page.page.keyboard.press("Enter")
    assert page.text("#hovered").startswith("folded: ")
    folded = page.ask("bands")
    assert len(folded) < len(rows)
    page.page.keyboard.press("ArrowRight")
    assert [label for label, _ in page.ask("bands")] == rows
    page.page.keyboard.press("ArrowLeft")
    assert page.ask("bands") == folded


# --- edges -----------------------------------------------------------------------------------------------------------


def test_edges_are_there_without_a_click(page: Opened, story: Story) -> None:
    assert page.ask("flows") > 10
    after = programs(story)[1]
    kept = kept_storages(placed(after), after.memory().refers)
    ribbons = page.ask("ribbons")
    assert sum(ribbon["bytes"] for ribbon in ribbons) == sum(storage.bytes for storage in kept)
    assert {ribbon["kind"] for ribbon in ribbons} == {"kept"}


def test_bands_are_as_wide_as_their_bytes_folded_or_not(page: Opened) -> None:
    folded = page.ask("ribbons")
    page.page.click("#open-all")
    opened_all = page.ask("ribbons")
    assert len(opened_all) > len(folded)
    assert sum(one["bytes"] for one in opened_all) == sum(one["bytes"] for one in folded)
    for ribbons in (folded, opened_all):
        thick = [one for one in ribbons if one["width"] > 1]
        assert thick
        scale = thick[0]["width"] / thick[0]["bytes"]
        assert all(one["width"] == pytest.approx(one["bytes"] * scale) for one in thick)


@pytest.mark.sweep
def test_views_are_folded_away_until_they_are_wanted(page: Opened, story: Story) -> None:
    after = programs(story)[1]
    view = next(node.name for node in after.graph.nodes if node.op == "call_function" and schema.is_view(node))
    place = page.ask("place", view)
    assert place["closed"]
    assert not page.page.is_checked("#views")
    page.find(view)
    assert page.page.is_checked("#views")
    assert not page.ask("place", view)["closed"]


@pytest.mark.sweep
def test_enter_steps_through_the_hits(page: Opened) -> None:
    page.page.fill("#search", "addmm")
    total = int(page.text("#hits").split()[0])
    assert total > 2
    seen = []
    for number in (1, 2):
        page.page.press("#search", "Enter")
        assert page.text("#hits") == f"{number} of {total}"
        seen.append(page.ask("selected"))
    page.page.press("#search", "Shift+Enter")
    assert page.text("#hits") == f"1 of {total}"
    assert page.ask("selected") == seen[0] != seen[1]
    page.page.press("#search", "Shift+Enter")
    assert page.text("#hits") == f"{total} of {total}"
    canvas = page.page.locator("#graph").bounding_box()
    place = page.ask("place", page.ask("selected"))
    assert canvas is not None
    assert canvas["y"] < place["y"] < canvas["y"] + canvas["height"]


def test_two_large_numbers_come_first(page: Opened, story: Story) -> None:
    before, after = (format_bytes(program.memory().peak_bytes) for program in programs(story))
    assert page.page.locator("#figures .value").all_inner_texts()[0] == f"{before} → {after}"
    assert page.page.evaluate("document.querySelector('main > section').id") == "memory"
    assert page.page.locator("#budget").is_hidden()
    assert page.page.locator("#by-seconds").is_hidden()
