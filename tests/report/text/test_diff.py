"""What differs between two programs: by what is computed, not by how it is numbered."""
# ruff: noqa: E501  (the text of a program is as wide as it is)

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline

import graphopt
from graphopt import Phase, Policy
from graphopt.ir.files.text import ends_of_life
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.text.diff import _merge, _Side
from tests.support.reporting import Drop, Net, Tiny, joint, plain
from tests.support.training import recomputed


def test_diff_of_recomputation() -> None:
    program = joint(Drop(), 3, 4)
    assert_expected_inline(
        plain(program.diff(recomputed(program, "::exp"))),
        """\
+4 nodes, -1 nodes, 2 changed; peak ...
--- Drop, joint stage: as captured
+++ Drop, joint stage: recompute{checkpoints=::exp}
@@ -1,9 +1,13 @@ forward, drop
 weight: f32[4],  # parameter weight
 args_0: f32[3, 4],  # input args[0]
 add = aten.add.Tensor(args_0, weight)  # f32[3, 4]
-dropout_mask = graphopt.dropout_mask([3, 4], [4, 1], 0.1, device='cpu')  # b8[3, 4]
+dropout_mask_random = record_random(graphopt.dropout_mask, [3, 4], [4, 1], 0.1, device='cpu')  # (u8[5056], b8[3, 4]) | keeps the generator's state for a replay
+dropout_mask_state = dropout_mask_random[0]  # u8[5056] | keeps the generator's state for a replay
+dropout_mask_result = dropout_mask_random[1]  # b8[3, 4] | keeps the generator's state for a replay
+del dropout_mask_random
-masked_dropout = graphopt.masked_dropout(add, dropout_mask, 0.1)  # f32[3, 4] drop
+masked_dropout = graphopt.masked_dropout(add, dropout_mask_result, 0.1)  # f32[3, 4] drop
 del add
+del dropout_mask_result
 exp = aten.exp(masked_dropout)  # f32[3, 4]
 del masked_dropout
 sum_1 = aten.sum(exp)  # f32[]
@@ -13,9 +17,13 @@ recompute, drop
 mul = aten.mul.Tensor(expand, exp)  # f32[3, 4]
 del exp
 del expand
+run_with_rng_state = replay_random(
+    dropout_mask_state, graphopt.dropout_mask, [3, 4], [4, 1], 0.1, device='cpu'
+)  # b8[3, 4] | recompute: start .. ::exp
+del dropout_mask_state
-masked_dropout_1 = graphopt.masked_dropout(mul, dropout_mask, 0.1)  # f32[3, 4]
+masked_dropout_1 = graphopt.masked_dropout(mul, run_with_rng_state, 0.1)  # f32[3, 4]
-del dropout_mask
 del mul
+del run_with_rng_state
 sum_2 = aten.sum.dim_IntList(masked_dropout_1, [0], True)  # f32[1, 4]
 del masked_dropout_1
 view = aten.view(sum_2, [4])  # f32[4] weight~
@@ decisions @@
+MUST_SAVE 1: ::exp""",
    )


@pytest.mark.sweep
def test_equal_programs_have_no_diff() -> None:
    first, second = joint(Net(), 3, 4), joint(Net(), 3, 4)
    assert re.fullmatch(r"\+0 nodes, -0 nodes; peak \d+ B: the programs are equal\n", first.diff(second))
    assert "peak" not in graphopt.capture(Net(), (torch.randn(3, 4),), stage="forward").diff(first).split("\n")[0]


def test_renumbered_nodes_are_not_changes() -> None:
    before, after = joint(Net(), 3, 4), joint(Net(scaled=True), 3, 4)
    numbers = [{node.name: str(node.target) for node in program.graph.nodes} for program in (before, after)]
    assert numbers[0]["add"] == numbers[1]["add"]
    assert "add_1" in numbers[0]
    text = before.diff(after)
    removed = [line for line in text.split("\n") if re.match(r"-(?!--)\S", line)]
    # what read the input reads the scaled input now; everything else is as it was
    assert removed
    assert all("args_0" in line for line in removed)
    assert re.match(r"\+2 nodes, -0 nodes, \d changed", text)
    assert "+add_new = aten.add.Tensor(mul, 1)" in text


def test_del_shows_only_where_a_lifetime_changed() -> None:
    before = joint(Net(), 3, 4)
    after = before.copy()
    ends = ends_of_life(after.graph)
    kept, longer = next(dying for dying in ends.values() if len(dying) == 2)
    after.insert(
        torch.ops.aten.neg.default,
        (longer,),
        before=after.output_node,
        phase=Phase.BACKWARD,
        origin="test",
        hint="negative",
    )
    text = before.diff(after)
    assert text.startswith("+1 nodes, -0 nodes, 1 lifetime changed")
    changed = [line for line in text.split("\n") if re.match(r"[+-](?![+-])", line)][1:]
    assert sorted(line for line in changed if "negative = " not in line) == [
        f"+del {longer.name}", "+del negative", f"-del {longer.name}",
    ]  # fmt: skip
    assert f" del {kept.name}" in text.split("\n")


def test_moved_nodes_and_decisions() -> None:
    before = joint(Net(), 3, 4)
    after = before.copy()
    nodes = {node.name: node for node in after.graph.nodes}
    nodes["sigmoid"].append(nodes["t_1"])
    after.set_policy([nodes["sigmoid"]], Policy.MUST_SAVE)
    text = before.diff(after)
    assert text.startswith("+0 nodes, -0 nodes, 1 moved; peak")
    assert "+MUST_SAVE 1: blocks.0::sigmoid" in text
    assert "-MUST_SAVE 1: blocks.0::sigmoid" in after.diff(before)


def test_diff_of_signatures() -> None:
    before = joint(Tiny(), 3, 2)
    after = before.copy()
    value, spec = after.outputs_of("gradient")[0]
    negative = after.insert(
        torch.ops.aten.neg.default, (value,), before=after.output_node, phase=Phase.BACKWARD, origin="test", hint="neg"
    )
    pairs = zip(after.output_values, after.outputs, strict=True)
    after.set_outputs([negative if s == spec else v for v, s in pairs], after.outputs)
    text = before.diff(after)
    assert text.startswith("+1 nodes, -0 nodes, 1 lifetime changed, ~1 outputs")
    assert f"-return {value.name},  # gradient linear.weight" in text
    assert "+return neg,  # gradient linear.weight" in text


@pytest.mark.sweep
@pytest.mark.parametrize("checkpoints", ["blocks.0", "blocks.*"])
def test_diff_holds_both_sides(checkpoints: str) -> None:
    before = joint(Net(3), 3, 4)
    after = recomputed(before, checkpoints)
    old, new = _Side.of(before), _Side.of(after)
    changes = list(_merge(old.entries, new.entries))
    for side, sign in ((old, "+"), (new, "-")):
        lines = [line for entry in side.entries for line in entry.lines]
        assert [change.line for change in changes if change.sign != sign] == lines
    _check_hunks(before.diff(after), [line for entry in old.entries for line in entry.lines])


def _check_hunks(text: str, old: list[str]) -> None:
    """The lines of a hunk stand in the first program where its header says."""
    heads = list(re.finditer(r"^@@ -(\d+),(\d+) \+(\d+),(\d+) @@.*\n((?:[ +-].*\n)*)", text, re.MULTILINE))
    assert heads
    for head in heads:
        start, size, _, new_size = (int(number) for number in head.groups()[:4])
        lines = head[5].splitlines()
        assert [line[1:] for line in lines if line[0] != "+"] == old[start - 1 : start - 1 + size]
        assert sum(line[0] != "-" for line in lines) == new_size


@pytest.mark.sweep
def test_texts_say_the_peak() -> None:
    before = joint(Net(1), 512, 4)
    after = recomputed(before, "blocks.0")
    peaks = [program.memory().peak_bytes for program in (before, after)]
    assert f"# predicted peak: {format_bytes(peaks[1])} ({peaks[1]} bytes) at " in after.to_text()
    assert f"; peak {format_bytes(peaks[0])} -> {format_bytes(peaks[1])}\n" in before.diff(after)
