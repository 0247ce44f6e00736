"""What the page's data says, without a browser: who is who in each snapshot, places, folds, bytes, the file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, Phase, Pipeline, Program
from graphopt.capture import CaptureSession
from graphopt.report.page import changes, page_of_program, page_of_rewritten, page_of_snapshots, story_of_snapshots
from graphopt.report.page.changes import text_diffs
from graphopt.report.page.data import page_data
from graphopt.report.page.kept import activations, kept_storages
from graphopt.report.page.lineage import follow, increasing
from graphopt.report.page.records import runs
from graphopt.report.page.sheet import merge_orders, set_out
from graphopt.report.page.story import ALL_PASSES, WITHOUT_PASSES, Story, story_of_program
from graphopt.report.page.tree import Item
from graphopt.report.pictures.visits import Placement
from graphopt.runtime.programs.rewrite import Rewritten, rewrite
from tests.support.properties import examples
from tests.support.training import Blocks, captured, next_token, recomputed

LAYERS = 3


def rewritten_step(passes: str, layers: int = LAYERS, optimizer: bool = True) -> Rewritten:
    torch.manual_seed(0)
    model = Blocks(layers)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) if optimizer else None
    session = CaptureSession(model, (torch.randint(0, 11, (2, 6)),), None, loss=next_token, optimizer=adam)
    return rewrite(session, Pipeline(passes), until="step" if optimizer else "joint")


@pytest.fixture(scope="module")
def result() -> Rewritten:
    return rewritten_step("recompute{checkpoints=blocks.*},fuse-update")


@pytest.fixture(scope="module")
def story(result: Rewritten) -> Story:
    return story_of_snapshots(result.snapshots, result.records)


@pytest.fixture(scope="module")
def data(story: Story) -> dict[str, Any]:
    return json.loads(json.dumps(page_data(story)))


def expanded(runs: list[int]) -> list[int]:
    return [first + step for first, length in zip(runs[::2], runs[1::2], strict=True) for step in range(length)]


def calls(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op not in ("placeholder", "output")]


# --- stories ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_story_compares_the_last_stage_with_and_without_passes(story: Story) -> None:
    told = [(snapshot.label, snapshot.program.stage) for snapshot in story.snapshots]
    assert told == [
        ("captured", "forward"), ("lowered", "joint"), ("recompute{checkpoints=blocks.*}", "joint"),
        (WITHOUT_PASSES, "step"), ("lowered", "step"), ("fuse-update", "step"),
    ]  # fmt: skip
    assert (story.before, story.after) == (3, 5)
    assert [story.previous(index) for index in range(6)] == [None, None, 1, None, 3, 4]
    assert story.pipeline == "recompute{checkpoints=blocks.*},fuse-update"
    before = story.snapshots[story.before].program
    assert not list(before.phase_nodes(Phase.RECOMPUTE))


@pytest.mark.sweep
def test_passes_of_the_last_stage_need_no_further_program() -> None:
    story = story_of_snapshots(*_parts(rewritten_step("recompute{checkpoints=blocks.*}", 2, optimizer=False)))
    assert [snapshot.label for snapshot in story.snapshots][-2:] == ["lowered", "recompute{checkpoints=blocks.*}"]
    assert (story.before, story.after) == (1, 2)


@pytest.mark.sweep
def test_a_story_without_passes_compares_nothing() -> None:
    story = story_of_snapshots(*_parts(rewritten_step("", 1, optimizer=False)))
    assert story.before == story.after == 1
    assert list(page_data(story)["timelines"]) == ["after"]


@pytest.mark.sweep
def test_programs_that_cannot_be_lowered_again_are_shown_as_they_are(result: Rewritten) -> None:
    loaded = [(label, Program.from_json(program.to_json())) for label, program in result.snapshots]
    story = story_of_snapshots(loaded, result.records)
    assert [snapshot.label for snapshot in story.snapshots].count(WITHOUT_PASSES) == 0
    assert (story.snapshots[story.before].label, story.snapshots[story.before].program.stage) == ("lowered", "step")
    page_of_snapshots(loaded, result.records)


def test_snapshots_and_records_have_to_belong_together(result: Rewritten) -> None:
    with pytest.raises(GraphoptError, match="give all the snapshots and records of one capture"):
        page_of_snapshots(result.snapshots, result.records[:1])
    with pytest.raises(GraphoptError, match="0 snapshots"):
        page_of_snapshots([], [])


def _parts(result: Rewritten) -> tuple[Any, Any]:
    return result.snapshots, result.records


# --- who is who ------------------------------------------------------------------------------------------------------


def test_changes_are_what_the_programs_differ_in(story: Story, data: dict[str, Any]) -> None:
    names = [data["strings"][number] for number in data["records"]["name"]]
    *single, together = data["snapshots"]
    for index, (snapshot, shown) in enumerate(zip(story.snapshots, single, strict=True)):
        inside = [node.name for node in snapshot.program.graph.nodes if node.op != "output"]
        assert [names[record] for record in expanded(shown["nodes"])] == inside
        previous = story.previous(index)
        if previous is None:
            assert shown["changes"] is None
            continue
        old, new = set(calls(story.snapshots[previous].program)), set(calls(snapshot.program))
        told = {kind: {names[r] for r in expanded(found)} for kind, found in shown["changes"].items()}
        assert told["created"] == new - old
        assert told["erased"] == old - new
        assert told["moved"] | told["rewired"] <= old & new
    assert data["first_shown"] == len(single)
    assert together["program"] == story.after
    assert expanded(together["nodes"]) == expanded(single[story.after]["nodes"])
    created, erased = (len(expanded(together["changes"][kind])) for kind in ("created", "erased"))
    ends = [len(calls(story.snapshots[index].program)) for index in (story.before, story.after)]
    assert created - erased == ends[1] - ends[0]
    assert created > len(expanded(single[story.after]["changes"]["created"]))


def test_what_is_counted_agrees_with_the_diff(story: Story, data: dict[str, Any]) -> None:
    whole, *passes = text_diffs(story)
    assert (whole.label, whole.snapshot) == (ALL_PASSES, story.after)
    before, after = (story.snapshots[index].program for index in (story.before, story.after))
    assert whole.lines == before.diff(after).splitlines()
    for found in passes:
        changes = data["snapshots"][found.snapshot]["changes"]
        counts = {kind: len(expanded(changes[kind])) for kind in changes}
        assert found.lines[0].startswith(f"+{counts['created']} nodes, -{counts['erased']} nodes")


def test_a_call_that_runs_elsewhere_has_moved() -> None:
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4))
    later = program.copy()
    first, *others = [node for node in later.graph.nodes if node.op == "call_function"]
    moving = next(node for node in others if all(source.op == "placeholder" for source in node.all_input_nodes))
    first.prepend(moving)
    lineage = follow([program, later], [True, False])
    difference = lineage.differences[1]
    assert difference is not None
    assert [node.name for node in difference.moved] == [moving.name]
    assert difference.created == difference.erased == difference.rewired == []


def test_a_name_that_stands_for_another_op_is_another_call() -> None:
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.zeros(2, 4))
    later = program.copy()
    gelu = next(node for node in later.graph.nodes if "gelu" in str(node.target))
    gelu.target = torch.ops.aten.neg.default
    difference = follow([program, later], [True, False]).differences[1]
    assert difference is not None
    assert [node.name for node in difference.created] == [node.name for node in difference.erased] == [gelu.name]


@given(st.permutations(range(12)))
def test_the_longest_increasing_run_is_increasing_and_longest(order: list[int]) -> None:
    kept = sorted(increasing(order))
    assert [order[i] for i in kept] == sorted(order[i] for i in kept)
    best = [1] * len(order)
    for i in range(len(order)):
        best[i] = 1 + max((best[j] for j in range(i) if order[j] < order[i]), default=0)
    assert len(kept) == max(best)


@given(st.lists(st.permutations(range(8)).map(lambda order: order[:5]), min_size=1, max_size=4))
def test_merged_orders_hold_everything_once_and_keep_the_first(orders: list[list[int]]) -> None:
    merged = merge_orders(orders)
    assert Counter(merged) == Counter({item for order in orders for item in order})
    assert [item for item in merged if item in orders[0]] == list(orders[0])


@given(st.lists(st.integers(0, 30)))
def test_runs_stand_for_their_numbers(numbers: list[int]) -> None:
    assert expanded(runs(numbers)) == numbers


# --- places ----------------------------------------------------------------------------------------------------------


def test_every_call_has_a_place_of_its_own_and_keeps_it(story: Story) -> None:
    programs = [snapshot.program for snapshot in story.snapshots]
    stages: dict[str, list[Program]] = {}
    for program in programs:
        stages.setdefault(program.stage, []).append(program)
    lineages = {stage: follow(found, [True] * len(found)) for stage, found in stages.items()}
    sheet = set_out(programs, lineages)
    for program, places in zip(programs, sheet.places, strict=True):
        assert [node.name for node in places] == calls(program)
        assert len(set(places.values())) == len(places)
        slots = sheet.slots[program.stage]
        assert all(0 <= place.slot < slots[place.row, place.lane] for place in places.values())
    for earlier, later in ((1, 2), (3, 4), (4, 5)):
        old = {node.name: place for node, place in sheet.places[earlier].items()}
        new = {node.name: place for node, place in sheet.places[later].items()}
        assert {name: new[name] for name in old if name in new} == {name: old[name] for name in old if name in new}


def walk(items: list[Item], visit: Callable[[Item], None]) -> None:
    for item in items:
        visit(item)
        walk(item.children, visit)


def test_the_tree_covers_every_row_once_and_groups_equal_blocks() -> None:
    program = captured(Blocks(4, p=0.0), torch.randint(0, 11, (2, 6)), loss=next_token)
    sheet = set_out([program], {"joint": follow([program], [True])})
    leaves: list[int] = []
    groups: list[Item] = []
    walk(sheet.tree, lambda item: leaves.extend(range(*item.rows)) if item.kind == "visit" else None)
    walk(sheet.tree, lambda item: groups.append(item) if item.kind == "group" else None)
    assert leaves == list(range(len(sheet.visits)))
    (group,) = groups
    assert group.label == "blocks.0 … 3"
    assert group.path == "blocks.*"
    assert [len(child.children) for child in group.children] == [len(group.children[0].children)] * 4


@pytest.mark.sweep
def test_blocks_that_one_snapshot_tells_apart_are_not_grouped() -> None:
    program = captured(Blocks(4, p=0.0), torch.randint(0, 11, (2, 6)), loss=next_token)
    changed = recomputed(program, "blocks.0", "blocks.1")
    sheet = set_out([program, changed], {"joint": follow([program, changed], [True, False])})
    groups: list[str] = []
    walk(sheet.tree, lambda item: groups.append(item.label) if item.kind == "group" else None)
    assert "0 … 3" not in groups
    assert any(label.endswith("2 … 3") for label in groups)


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_timelines_hold_every_byte(story: Story, data: dict[str, Any]) -> None:
    for name, index in (("before", story.before), ("after", story.after)):
        timeline, shown = story.snapshots[index].program.memory(), data["timelines"][name]
        alive = [0] * len(timeline.nodes)
        storages = shown["storages"]
        for size, first, last in zip(storages["bytes"], storages["first"], storages["last"], strict=True):
            for position in range(max(first, 0), min(last + 1, len(alive))):
                alive[position] += size
        for position, size in shown["temporaries"]:
            alive[position] += size
        assert alive == timeline.bytes
        assert shown["peak_bytes"] == timeline.peak_bytes
        assert shown["calls"][shown["peak_at"]] >= 0
        assert shown["resident_bytes"] == timeline.resident_bytes


def test_bytes_of_records_are_those_of_the_tensors(story: Story, data: dict[str, Any]) -> None:
    shown = data["records"]
    inside = expanded(data["snapshots"][story.after]["nodes"])
    sizes = {data["strings"][shown["name"][record]]: shown["bytes"][record] for record in inside}
    for tensor in story.snapshots[story.after].program.tensors:
        assert sizes[tensor.node] == tensor.bytes


def test_activations_are_what_is_kept(story: Story) -> None:
    pair = []
    for index in (story.before, story.after):
        program = story.snapshots[index].program
        pair.append((Placement(program), program.memory()))
    rows = activations(pair[0], pair[1])
    for total, (placement, timeline) in zip(
        (sum(r.before for r in rows), sum(r.after for r in rows)), pair, strict=True
    ):
        assert total == sum(storage.bytes for storage in kept_storages(placement, timeline.refers)) > 0
    assert {row.what for row in rows} >= {"saved", "recomputed"}
    folded = [row for row in rows if row.name.startswith("blocks.*")]
    assert folded
    assert all(row.count > 1 for row in folded)
    assert any(row.what == "recomputed" and row.count == LAYERS for row in folded)


def test_rows_keep_what_the_activations_are(story: Story, data: dict[str, Any]) -> None:
    for name, at in (("before", 3), ("after", 4)):
        kept = data["snapshots"][data[name]]["kept"]
        assert sum(kept["bytes"]) == sum(row[at] for row in data["activations"])


def test_what_is_kept_leads_from_forward_to_a_reader_in_backward(story: Story, data: dict[str, Any]) -> None:
    program = story.snapshots[story.before].program
    kept, records, strings = data["snapshots"][data["before"]]["kept"], data["records"], data["strings"]
    nodes = {node.name: node for node in program.graph.nodes}
    refers = program.memory().refers
    for maker, reader in zip(kept["record"], kept["reader"], strict=True):
        made, read = (nodes[strings[records["name"][record]]] for record in (maker, reader))
        assert records["lane"][maker] < 2 <= records["lane"][reader]
        stored = {id(storage) for storage in refers[made]}
        assert any(stored & {id(storage) for storage in refers[source]} for source in read.all_input_nodes)


def test_a_page_without_a_search_has_no_frontier(data: dict[str, Any]) -> None:
    assert data["frontier"] is None


# --- diffs, options, the file ----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_very_long_diffs_are_cut_and_say_how_to_get_the_rest(
    result: Rewritten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_LINES", 8)
    plain = story_of_snapshots(result.snapshots, result.records)
    together, first, second = text_diffs(plain)
    whole = result.snapshots[1][1].diff(result.snapshots[2][1]).splitlines()
    assert first.lines == whole[:8]
    assert first.cut == len(whole) - 8 > 0
    assert together.cut > 0
    assert (together.rest, first.rest) == ("", "snapshots[1][1].diff(snapshots[2][1])")
    assert second.rest == ("snapshots[3][1].diff(snapshots[4][1])" if second.cut else "")
    told = story_of_snapshots(result.snapshots, result.records, command="graphopt view 'a b.py:c' --passes 'x{y=1}'")
    rests = {found.rest for found in text_diffs(told) if found.cut}
    assert rests == {"graphopt diff 'a b.py:c' --passes 'x{y=1}'"}


def test_every_option_in_force_is_told(data: dict[str, Any]) -> None:
    assert data["passes"][0]["options"] == [["checkpoints", "blocks.*", False]]
    assert data["passes"][1]["options"] == []


@pytest.mark.sweep
def test_the_policy_has_the_hashes_of_script_and_style(result: Rewritten) -> None:
    text = page_of_rewritten(result)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        content = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(content) == 1
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy[1]
    assert not re.search(r"https?://", text)


def test_equal_programs_give_equal_pages(result: Rewritten) -> None:
    program = result.program
    assert program.to_html() == program.copy().to_html() == page_of_program(program)
    assert story_of_program(program).pipeline == ",".join(program.history)


def test_a_forward_program_has_a_page() -> None:
    program = graphopt.capture(nn.Linear(4, 4), (torch.zeros(2, 4),), stage="forward")
    assert "forward graph of 1 op;" in program.to_html()


@pytest.mark.sweep
@examples(5)
@given(st.lists(st.sampled_from(["linear", "gelu", "norm", "drop"]), max_size=5))
def test_any_chain_of_modules_has_a_page(kinds: list[str]) -> None:
    make = {"linear": lambda: nn.Linear(4, 4), "gelu": nn.GELU, "norm": lambda: nn.LayerNorm(4), "drop": nn.Dropout}
    program = captured(nn.Sequential(nn.Linear(4, 4), *(make[kind]() for kind in kinds)), torch.zeros(2, 4))
    data = page_data(story_of_program(program))
    assert len(expanded(data["snapshots"][0]["nodes"])) == len(program.graph.nodes) - 1
    assert data["timelines"]["after"]["peak_bytes"] == program.memory().peak_bytes
