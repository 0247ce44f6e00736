"""The static pictures: where things go in the U, what the SVG says, and Graphviz' language."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt import Phase, Program, _torch
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, info, set_info
from graphopt.ir.ops import schema
from graphopt.ir.words.written_units import format_bytes
from graphopt.passes import Recompute
from graphopt.report.formats.dot import to_dot
from graphopt.report.pictures.layout import MAX_ROWS, Edge, Lane, Layout, lay_out
from graphopt.report.pictures.picture import to_svg
from tests.support.properties import examples
from tests.support.training import Blocks, captured, mean_square, next_token

LAYERS = 4
SVG = "{http://www.w3.org/2000/svg}"
aten = torch.ops.aten


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Program:
    """Four equal blocks between an embedding and a head; never rewritten by a test."""
    return captured(Blocks(LAYERS, p=0.0), torch.randint(0, 11, (2, 6)), loss=next_token)


def recomputed(program: Program, *checkpoints: str) -> Program:
    changed = program.copy()
    graphopt.Pipeline([Recompute(checkpoints=checkpoints)]).run(changed)
    return changed


@pytest.fixture(scope="module")
def everywhere(plain: Program) -> Program:
    return recomputed(plain, "blocks.*")


@pytest.fixture(scope="module")
def stepping() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    return graphopt.capture(model, (torch.randn(3, 4),), loss=mean_square, optimizer=optimizer)


def made(modules: Sequence[str], size: int = 4, title: str = "Made") -> Program:
    """One gelu for each module path, a loss outside of them, and the backward; put together without a model."""
    program = Program(fx.Graph(), "joint", [], [], title=title)
    program.graph.output(())
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        example = torch.empty(size)
    value = program.add_input("x", example, InputSpec("input", "x"))
    forward = []
    for path in modules:
        value = add(program, aten.gelu.default, (value,), Phase.FORWARD, path)
        forward.append(value)
    loss = add(program, aten.neg.default, (value,), Phase.FORWARD, "")
    gradient = add(program, aten.full_like.default, (loss, -1.0), Phase.BACKWARD, "")
    for path, result in zip(reversed(modules), reversed(forward), strict=True):
        gradient = add(program, aten.gelu_backward.default, (gradient, result.args[0]), Phase.BACKWARD, path)
    program.set_outputs([loss, gradient], [OutputSpec("loss", "loss"), OutputSpec("gradient", "x")])
    return program


def add(program: Program, target: Callable[..., object], args: tuple[object, ...], phase: Phase, path: str) -> fx.Node:
    node = program.insert(target, args, before=program.output_node, phase=phase, origin="test")
    set_info(node, NodeInfo(phase, module=path, names=(f"{path}::{node.name}",)))
    return node


def only(program: Program, **options: object) -> Layout:
    (layout,) = lay_out([program], **options)  # type: ignore[arg-type]
    return layout


def row_of(layout: Layout) -> dict[str, int]:
    """The row of every node."""
    return {node.name: layout.boxes[node.box].row for node in layout.nodes}


def saved_edges(layout: Layout) -> list[Edge]:
    return [edge for edge in layout.edges if edge.kind == "saved"]


def calls(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_equal_blocks_share_one_frame_of_rows(plain: Program) -> None:
    layout = only(plain)
    (frame,) = (frame for frame in layout.frames if frame.copies > 1)
    assert (frame.label, frame.copies) == (f"blocks.0 … blocks.{LAYERS - 1}", LAYERS)
    inside = layout.rows[frame.first : frame.last + 1]
    assert all(len(row.paths) == LAYERS and row.label.startswith("blocks.*") for row in inside)
    assert [row.label for row in layout.rows if row not in inside] == ["embed", "head", "Blocks"]
    qkv = next(row for row in inside if row.label == "blocks.*.qkv")
    assert qkv.paths == tuple(f"blocks.{i}.qkv" for i in range(LAYERS))


def test_rows_follow_the_order_of_forward(plain: Program) -> None:
    layout = only(plain, fold=False)
    rows = row_of(layout)
    order = [rows[node.name] for node in plain.phase_nodes(Phase.FORWARD)]
    assert order == sorted(order)
    assert [row.y for row in layout.rows] == sorted({row.y for row in layout.rows})
    assert all(len(row.paths) == 1 for row in layout.rows)
    assert {frame.copies for frame in layout.frames} == {1}


def test_blocks_that_a_pass_changed_are_not_folded_with_others(plain: Program) -> None:
    some = recomputed(plain, "blocks.0", "blocks.1")
    labels = [frame.label for frame in only(some).frames]
    paths = {row.paths for row in only(some).rows if row.label.endswith(".qkv")}
    touched = {
        info(node).module.split(".")[1] for node in some.phase_nodes(Phase.RECOMPUTE) if "." in info(node).module
    }
    assert touched == {"0", "1"}
    for group in paths:
        assert len({path.split(".")[1] in touched for path in group}) == 1, "changed and unchanged blocks share a row"
    assert f"blocks.2 … blocks.{LAYERS - 1}" in labels


def test_only_siblings_that_differ_in_a_number_are_folded() -> None:
    layout = only(made(["query", "key", "layer1", "layer2", "layer3", "other"]))
    assert [row.paths for row in layout.rows] == [
        ("query",),
        ("key",),
        ("layer1", "layer2", "layer3"),
        ("other",),
        ("",),
    ]
    assert layout.rows[2].label == "layer1 … layer3"


def test_blocks_of_blocks_are_folded_twice() -> None:
    names = [
        f"outer.{i}.{part}" for i in range(3) for part in ("in", "inner.0.a", "inner.0.b", "inner.1.a", "inner.1.b")
    ]
    layout = only(made(["first", *names]))
    assert [(frame.label, frame.copies) for frame in layout.frames] == [
        ("outer.0 … outer.2", 3),
        ("outer.*.inner.0 … outer.*.inner.1", 2),
    ]
    assert [(row.label, len(row.paths)) for row in layout.rows] == [
        ("first", 1), ("outer.*.in", 3), ("outer.*.inner.*.a", 6), ("outer.*.inner.*.b", 6), ("Made", 1),
    ]  # fmt: skip
    assert layout.rows[2].paths == tuple(f"outer.{i}.inner.{j}.a" for i in range(3) for j in range(2))


def test_modules_are_closed_until_the_rows_are_few_enough() -> None:
    paths = [f"stage.{i}.{leaf}" for i in range(20) for leaf in ("a", "b", "c", "d")[: 2 + i % 2]]
    program = made(paths)
    assert len(only(program).rows) <= MAX_ROWS
    assert len(only(program, fold=False).rows) == len(paths) + 1
    closed = only(program, max_rows=len(paths))
    assert [row.label for row in closed.rows] == [*(f"stage.{i}" for i in range(20)), "Made"]
    assert [row.label for row in only(program, max_rows=3).rows] == ["stage", "Made"]


def test_outermost_modules_are_always_rows() -> None:
    names = [f"part_{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(MAX_ROWS + 5)]
    assert len(only(made(names)).rows) == len(names) + 1


def test_a_module_called_again_has_a_row_for_each_visit() -> None:
    program = made(["conv1", "relu", "conv2", "relu", "conv3", "relu"])
    layout = only(program)
    assert [row.label for row in layout.rows] == ["conv1", "relu", "conv2", "relu", "conv3", "relu", "Made"]
    assert len({row.key for row in layout.rows}) == 7
    assert all(len(box.nodes) == 1 for box in layout.boxes)


# --- boxes -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("fold", [True, False])
def test_every_call_has_one_place_inside_its_box(everywhere: Program, fold: bool) -> None:
    layout = only(everywhere, fold=fold)
    assert sorted(node.name for node in layout.nodes) == sorted(node.name for node in calls(everywhere))
    for node in layout.nodes:
        box = layout.boxes[node.box]
        assert box.x < node.x < box.x + box.width
        assert box.y < node.y < box.y + box.height
    for index, box in enumerate(layout.boxes):
        first = [node.name for node in layout.nodes if node.box == index and node.copy == 0]
        assert box.nodes == first
        assert len(first) * len(layout.rows[box.row].paths) == sum(node.box == index for node in layout.nodes)


def test_boxes_do_not_overlap(everywhere: Program) -> None:
    boxes = only(everywhere).boxes
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart_x or one.y + one.height <= other.y or other.y + other.height <= one.y


@pytest.mark.parametrize("fold", [True, False])
def test_backward_and_recomputation_stand_at_the_height_of_their_module(everywhere: Program, fold: bool) -> None:
    layout = only(everywhere, fold=fold)
    nodes = {node.name: node for node in everywhere.graph.nodes}
    placed = {node.name: node for node in layout.nodes}
    seen = set()
    for name, place in placed.items():
        known, box = info(nodes[name]), layout.boxes[place.box]
        path = layout.rows[box.row].paths[place.copy]
        if known.phase is Phase.BACKWARD and known.module.endswith((".qkv", ".out")):
            assert path == known.module
            assert layout.boxes[place.box].lane is Lane.BACKWARD
            seen.add(path)
        if known.phase is Phase.RECOMPUTE and known.module.endswith((".qkv", ".norm")):
            assert path == known.module
            assert layout.boxes[place.box].lane is Lane.RECOMPUTE
    assert seen == {f"blocks.{i}.{leaf}" for i in range(LAYERS) for leaf in ("qkv", "out")}


def test_recomputed_ops_of_a_shared_module_stand_at_the_visit_that_they_repeat(everywhere: Program) -> None:
    rows = row_of(only(everywhere, fold=False))
    twins = {name: node for node in everywhere.phase_nodes(Phase.FORWARD) for name in info(node).names}
    again = [node for node in everywhere.phase_nodes(Phase.RECOMPUTE) if info(node).names]
    originals = [(node, twins.get(info(node).names[0].removesuffix("'"))) for node in again]
    pairs = [(clone, original) for clone, original in originals if original is not None]  # others are read only again
    assert len(pairs) > 0.8 * len(again) > 20
    assert all(rows[clone.name] == rows[original.name] for clone, original in pairs)


def test_a_recomputed_op_without_arguments_stands_with_its_original() -> None:
    program = made(["a", "b", "c"])
    _, second, *_ = program.phase_nodes(Phase.FORWARD)
    position = program.insert(
        aten.ones.default, ([4],), before=second, phase=Phase.FORWARD, origin="test", names=("one",)
    )
    again = program.insert(
        aten.ones.default, ([4],), before=program.output_node, phase=Phase.RECOMPUTE, origin="test", names=("one'",)
    )
    layout = only(program)
    rows = row_of(layout)
    assert [row.label for row in layout.rows] == ["a", "Made", "b", "c", "Made"]
    assert rows[again.name] == rows[position.name] == 1


def test_gradients_flow_up_through_the_visits_of_a_shared_module() -> None:
    program = made(["conv1", "relu", "conv2", "relu", "conv3", "relu"])
    rows = row_of(only(program))
    order = [rows[node.name] for node in program.phase_nodes(Phase.BACKWARD)]
    assert order == [6, 5, 4, 3, 2, 1, 0]


def test_a_sum_of_gradients_stands_with_its_last_summand() -> None:
    program = made(["a", "b", "c"])
    first, *_, last = program.phase_nodes(Phase.BACKWARD)
    total = add(program, aten.add.Tensor, (first, last), Phase.BACKWARD, "")
    rows = row_of(only(program))
    assert rows[total.name] == rows[last.name] == 0


def test_the_update_stands_above_everything_on_the_right(stepping: Program) -> None:
    layout = only(stepping)
    (update,) = (box for box in layout.boxes if box.phase is Phase.UPDATE)
    assert update.lane is Lane.BACKWARD
    assert update.y + update.height < min(box.y for box in layout.boxes if box is not update)
    assert layout.rows[update.row].label == "optimizer.step"
    sources = {layout.boxes[edge.source].phase for edge in layout.edges if layout.boxes[edge.target] is update}
    assert sources == {Phase.BACKWARD}


def outside() -> Program:
    """A made program with one tensor offloaded and a collective for the gradient of the last module."""
    program = made(["a", "b", "c"])
    b = next(node for node in program.phase_nodes(Phase.FORWARD) if info(node).module == "b")
    reader = next(user for user in b.users if info(user).phase is Phase.BACKWARD)
    out = program.insert(aten.clone.default, (b,), after=b, phase=Phase.TRANSFER, origin="offload", like=b)
    back = program.insert(
        aten.clone.default, (out,), before=reader, phase=Phase.TRANSFER, origin="offload", like=reader
    )
    reader.replace_input_with(b, back)
    program.insert(aten.mul.Tensor, (reader, 0.5), after=reader, phase=Phase.SYNC, origin="exchange", like=reader)
    return program


def test_transfers_and_collectives_stand_outside_on_the_side_they_run() -> None:
    program = outside()
    layout = only(program)
    places = {(layout.rows[box.row].label, box.lane, box.phase): box for box in layout.boxes}
    out = places["b", Lane.FORWARD_OUTSIDE, Phase.TRANSFER]
    back = places["c", Lane.BACKWARD_OUTSIDE, Phase.TRANSFER]
    sync = places["c", Lane.BACKWARD_OUTSIDE, Phase.SYNC]
    assert back.y + back.height == sync.y
    assert out.kept == [16]
    edge = next(edge for edge in saved_edges(layout) if layout.boxes[edge.source] is out)
    assert layout.boxes[edge.target] is back
    picture = to_svg(program)
    assert 'class="hosted"' in picture
    assert "kept outside" in picture


# --- edges -----------------------------------------------------------------------------------------------------------


def crossing_bytes(program: Program) -> int:
    """What forward leaves behind for backward, told from the memory timeline alone."""
    timeline = program.memory()
    turn = next(i for i, node in enumerate(timeline.nodes) if info(node).phase is Phase.BACKWARD)
    return sum(
        storage.bytes for storage in timeline.storages
        if not storage.is_input and storage.first < turn <= storage.last < len(timeline.nodes)
    )  # fmt: skip


@pytest.mark.sweep(but=("True",))
@pytest.mark.parametrize("fold", [True, False])
def test_saved_arrows_carry_each_kept_tensor_once(plain: Program, everywhere: Program, fold: bool) -> None:
    for program in (plain, everywhere):
        layout = only(program, fold=fold)
        assert sum(edge.bytes for edge in saved_edges(layout)) == crossing_bytes(program) > 0
        assert sum(sum(box.kept) for box in layout.boxes) == crossing_bytes(program)
    assert crossing_bytes(everywhere) < crossing_bytes(plain)


def test_arrows_go_across_or_stay_on_their_side(everywhere: Program) -> None:
    layout = only(everywhere)
    left = (Lane.FORWARD, Lane.FORWARD_OUTSIDE)
    for edge in layout.edges:
        ends = [layout.boxes[edge.source].lane in left, layout.boxes[edge.target].lane in left]
        assert ends == [True, False] if edge.kind == "saved" else ends[0] == ends[1]
        assert (edge.bytes > 0) is (edge.kind == "saved")
    assert {edge.kind for edge in layout.edges} == {"saved", "data"}


def test_a_tensor_goes_to_the_row_that_reads_it_last() -> None:
    program = made(["a", "b", "c", "d"])
    a = next(program.phase_nodes(Phase.FORWARD))
    *_, last = program.phase_nodes(Phase.BACKWARD)
    add(program, aten.add.Tensor, (last, a), Phase.BACKWARD, "a")
    layout = only(program)
    (edge,) = (edge for edge in saved_edges(layout) if layout.boxes[edge.source].row == 0)
    assert (layout.boxes[edge.target].row, edge.bytes, edge.tensors) == (0, 16, 1)


def test_arrows_between_folded_blocks_are_told_apart(everywhere: Program) -> None:
    layout = only(everywhere)
    between = [edge for edge in saved_edges(layout) if edge.crossing]
    assert between
    for edge in between:
        rows = [layout.rows[layout.boxes[end].row] for end in (edge.source, edge.target)]
        assert [len(row.paths) for row in rows] == [LAYERS, LAYERS]
    assert not any(edge.crossing for edge in only(everywhere, fold=False).edges)


# --- stability -------------------------------------------------------------------------------------------------------


def test_the_same_program_gives_the_same_picture(everywhere: Program) -> None:
    assert only(everywhere) == only(everywhere.copy())
    assert to_svg(everywhere) == to_svg(everywhere.copy())
    assert to_dot(everywhere) == to_dot(everywhere.copy())


@pytest.mark.sweep
def test_modules_do_not_move_from_pass_to_pass(plain: Program, everywhere: Program) -> None:
    some = recomputed(plain, "blocks.0", "blocks.1")
    layouts = lay_out([plain, everywhere, some])
    assert layouts[0].rows == layouts[1].rows == layouts[2].rows
    places = [{(b.row, b.lane): (b.x, b.y) for b in layout.boxes} for layout in layouts]
    for later in places[1:]:
        assert all(later[key] == place for key, place in places[0].items())
    assert {row.paths for row in layouts[0].rows} == {row.paths for row in only(some).rows}
    alone = {row.key: row.y for row in only(plain).rows}
    assert alone == {row.key: row.y for row in only(everywhere).rows}


def test_a_module_that_only_a_later_program_has_gets_its_row_in_place() -> None:
    before, after = made(["a", "c"]), made(["a", "b", "bb", "c"])
    layouts = lay_out([before, after])
    assert [row.label for row in layouts[0].rows] == ["a", "b", "bb", "c", "Made"]
    assert {layouts[0].rows[box.row].label for box in layouts[0].boxes} == {"a", "c", "Made"}


def test_no_program_no_picture() -> None:
    assert lay_out([]) == []


# --- the SVG ---------------------------------------------------------------------------------------------------------


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_the_head_says_what_it_is(everywhere: Program) -> None:
    shown = texts(ET.fromstring(to_svg(everywhere)))
    assert shown[0] == "Blocks"
    memory = everywhere.memory()
    assert shown[1].split(" · ") == [
        "joint stage", f"{len(everywhere.graph.nodes):,} nodes", f"predicted peak {format_bytes(memory.peak_bytes)}",
        f"of which {format_bytes(memory.resident_bytes)} persistent",
        f"{format_bytes(crossing_bytes(everywhere))} saved for backward",
    ]  # fmt: skip
    assert shown[2] == "after recompute{checkpoints=blocks.*}"


def test_a_forward_program_has_one_column_and_no_peak() -> None:
    program = graphopt.capture(nn.Sequential(nn.Linear(4, 4), nn.GELU()), (torch.randn(2, 4),), stage="forward")
    picture = to_svg(program)
    assert "peak" not in picture
    assert "kept" not in picture
    assert {box.lane for box in only(program).boxes} == {Lane.FORWARD}
    assert texts(ET.fromstring(picture))[1] == f"forward stage · {len(program.graph.nodes)} nodes"


def test_the_legend_names_the_phases_that_there_are(plain: Program, everywhere: Program, stepping: Program) -> None:
    for program in (plain, everywhere, stepping, outside()):
        phases = {info(node).phase.value for node in calls(program)}
        root = ET.fromstring(to_svg(program))
        (head,) = (g for g in root.findall(f"{SVG}g") if g.get("transform"))
        assert {text for text in texts(head) if text in {phase.value for phase in Phase}} == phases
        patterns = {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
        assert patterns == {f"gou-{phase}" for phase in phases}
        used = set(re.findall(r"url\(#([\w-]+)\)", to_svg(program)))
        assert used == patterns


def test_a_box_says_module_ops_and_kept_bytes(plain: Program) -> None:
    layout = only(plain)
    root = ET.fromstring(to_svg(plain))
    groups = [g for g in root.findall(f"{SVG}g") if not g.get("transform")]
    assert len(groups) == len(layout.boxes)
    by_title = {g.findtext(f"{SVG}title") or "": texts(g) for g in groups}
    title, lines = next((t, lines) for t, lines in by_title.items() if t.startswith("forward of blocks.0.qkv"))
    assert lines[:2] == ["blocks.*.qkv", "addmm"]
    box = next(b for b in layout.boxes if layout.rows[b.row].label == "blocks.*.qkv" and b.phase is Phase.FORWARD)
    kept = f"saves {LAYERS} × {format_bytes(box.kept[0])}"
    assert lines[2] == f"{len(box.nodes)} ops · {kept}"
    assert kept in title
    assert all(f"blocks.{i}.qkv" in title for i in range(LAYERS))


def test_views_are_not_listed_and_the_largest_results_come_first() -> None:
    program = made(["a"], size=8)
    (gelu,) = (node for node in program.phase_nodes(Phase.FORWARD) if info(node).module == "a")
    for target, args in ((aten.view.default, (gelu, [2, 4])), (aten.sum.default, (gelu,)), (aten.sum.default, (gelu,))):
        program.insert(target, args, before=gelu.next, phase=Phase.FORWARD, origin="test", like=gelu)
    box = next(g for g in ET.fromstring(to_svg(program)).findall(f"{SVG}g") if not g.get("transform"))
    assert texts(box)[:2] == ["a", "gelu, sum ×2"]
    smaller_first = [schema.op_name(node) for node in program.phase_nodes(Phase.FORWARD)][:4]
    assert smaller_first == ["gelu", "sum", "sum", "view"]


def test_everything_is_inside_the_view_box(everywhere: Program, stepping: Program) -> None:
    for program in (everywhere, stepping, outside()):
        for fold in (True, False):
            root = ET.fromstring(to_svg(program, fold=fold))
            left, top, width, height = map(float, root.attrib["viewBox"].split())
            assert (float(root.attrib["width"]), float(root.attrib["height"])) == (width, height)
            head = next(g for g in root.iter(f"{SVG}g") if g.get("transform"))
            shapes = [e for e in root.iter() if e not in list(head) and "x" in e.attrib]
            assert len(shapes) > 10
            for shape in shapes:
                x, y = float(shape.attrib["x"]), float(shape.attrib["y"])
                assert left <= x <= x + float(shape.get("width", 0)) <= left + width
                assert top <= y <= y + float(shape.get("height", 0)) <= top + height


def test_arrows_are_as_thick_as_their_bytes(plain: Program) -> None:
    edges = sorted((edge.bytes for edge in saved_edges(only(plain))), reverse=True)
    root = ET.fromstring(to_svg(plain))
    drawn = [path for path in root.findall(f"{SVG}path") if path.get("class") == "saved"]
    widths = [float(path.attrib["stroke-width"]) for path in drawn]
    assert len(widths) == len(edges)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(13.0)
    for width, size in zip(widths, edges, strict=True):
        assert width == pytest.approx(max(1.2, 13.0 * size / edges[0]), abs=0.06)


def test_the_file_needs_nothing_else_and_knows_the_dark(everywhere: Program) -> None:
    picture = to_svg(everywhere)
    assert "@media (prefers-color-scheme:dark)" in picture
    for foreign in ("href", "@import", "@font-face", "<script", "<image", "<foreignObject", "url(http"):
        assert foreign not in picture
    assert re.findall(r"https?://[^\"]+", picture) == ["http://www.w3.org/2000/svg"]
    style = ET.fromstring(picture).findtext(f"{SVG}style") or ""
    assert style.count("{") == style.count("}")
    outermost = re.sub(r"@media[^{]*\{", "", style)
    assert all(rule.strip().startswith((".gou", "}")) or not rule.strip() for rule in outermost.split("\n"))


@pytest.mark.sweep
def test_a_deep_program_is_a_small_picture() -> None:
    paths = [
        f"layers.{i}.{leaf}" for i in range(300) for leaf in ("norm", "attn.qkv", "attn.out", "mlp.up", "mlp.down")
    ]
    program = made(["embed", *paths, "head"])
    picture = to_svg(program)
    assert len(only(program).rows) == 8
    assert len(picture) < 40_000
    assert "layers.0 … layers.299" in picture


HOSTILE = "a<b>&\"'\\{x}\n]]>\x00\ud800é ×"


def test_hostile_names_are_only_text() -> None:
    program = made(["safe", HOSTILE], title=f"</title><script>{HOSTILE}")
    root = ET.fromstring(to_svg(program))
    assert not list(root.iter(f"{SVG}script"))
    shown = " ".join(element.text or "" for element in root.iter(f"{SVG}title"))
    assert "a<b>&\"'\\{x}\n]]>\ufffd\ufffdé ×" in shown
    to_svg(program).encode("utf-8")
    to_dot(program).encode("utf-8")


@examples(15)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5), st.text(max_size=50))
def test_any_names_give_well_formed_files(names: list[str], title: str) -> None:
    program = made(names, title=title)
    root = ET.fromstring(to_svg(program))
    assert len([g for g in root.findall(f"{SVG}g") if not g.get("transform")]) == len(only(program).boxes)
    check_dot(program)


# --- Graphviz --------------------------------------------------------------------------------------------------------

STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def check_dot(program: Program) -> str:
    """Whether the text is well-formed: strings closed, braces balanced, one statement for each node and edge."""
    text = to_dot(program)
    bare = STRING.sub("S", text)
    assert '"' not in bare
    depth = 0
    for character in bare:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    nodes = list(program.graph.nodes)
    assert len(re.findall(r"^\s*S \[", bare, re.MULTILINE)) == len(nodes)
    assert len(re.findall(r"^\s*S -> S$", bare, re.MULTILINE)) == sum(len(node.all_input_nodes) for node in nodes)
    return text


def test_dot_has_every_node_and_edge(everywhere: Program, stepping: Program) -> None:
    for program in (everywhere, stepping):
        text = check_dot(program)
        for node in calls(program):
            assert re.search(
                rf'"{re.escape(node.name)}" \[fillcolor="#\w+", label="{re.escape(schema.op_name(node))}\\n', text
            )
            for source in node.all_input_nodes:
                assert f'"{source.name}" -> "{node.name}"' in text


def test_dot_groups_by_phase_and_then_by_module(stepping: Program) -> None:
    text = check_dot(stepping)
    phases = re.findall(r"^  subgraph cluster_(\w+) \{$", text, re.MULTILINE)
    assert phases == ["inputs", "forward", "backward", "update"]
    forward = text.split("subgraph cluster_forward {")[1].split("subgraph cluster_backward {")[0]
    assert re.findall(r'^      label="(.*)"$', forward, re.MULTILINE) == ["0", "1", "2"]
    assert r'"gelu" [fillcolor="#e6f3fc", label="gelu\nf32[3, 4]"]' in forward
    inputs = text.split("subgraph cluster_inputs {")[1].split("subgraph cluster_forward {")[0]
    assert r'label="parameter\n0.weight\nf32[4, 4]"' in inputs


def test_dot_escapes_names() -> None:
    text = check_dot(made(["safe", HOSTILE]))
    assert r"""label="a<b>&amp;\"'\\{x}\n]]>""" in text


# --- from a program --------------------------------------------------------------------------------------------------


def test_programs_draw_themselves(stepping: Program, tmp_path: Path) -> None:
    assert stepping.to_svg() == to_svg(stepping)
    assert stepping.to_dot() == to_dot(stepping)
    file = tmp_path / "picture.svg"
    file.write_text(stepping.to_svg(), encoding="utf-8")
    assert ET.parse(file).getroot().tag == f"{SVG}svg"


def test_what_the_picture_shows_is_also_said(everywhere: Program) -> None:
    root = ET.fromstring(to_svg(everywhere))
    told = root.findtext(f"{SVG}desc") or ""
    assert root.get("role") == "img"
    assert told.startswith("forward down the left, backward up the right; joint stage · ")
    counted = f"{sum(1 for _ in everywhere.phase_nodes(Phase.RECOMPUTE))} recompute"
    assert counted in ET.tostring(ET.fromstring(to_svg(everywhere, fold=False)), encoding="unicode")
    assert f"predicted peak {format_bytes(everywhere.memory().peak_bytes)}" in told
    assert "recompute{checkpoints=blocks.*}" in told


def test_programs_without_a_loss_and_with_one_module_are_drawn() -> None:
    program = graphopt.capture(nn.Linear(3, 2), (torch.randn(4, 3, requires_grad=True),))
    layout = only(program)
    assert [row.label for row in layout.rows] == ["Linear"]
    assert {box.phase for box in layout.boxes} == {Phase.FORWARD, Phase.BACKWARD}
    ET.fromstring(to_svg(program))
