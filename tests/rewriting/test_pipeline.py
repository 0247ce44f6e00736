"""The pass core: the text form of passes, order and conflicts, the registry, running, instruments, errors."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, Pass, PassError, Phase, Pipeline, PipelineError, Program
from graphopt.passes import Recompute
from graphopt.rewriting.instruments import LogPasses, Snapshots
from graphopt.rewriting.pass_ import PassRecord
from graphopt.rewriting.registry import available_passes, find_pass
from tests.support.training import Net, Plain, captured


@final
@dataclass(frozen=True)
class Leveled(Plain):
    name: ClassVar[str] = "leveled"

    level: int = 1


def named(label: str, **attributes: Any) -> Pass:
    """A pass that does nothing, with any class attributes."""
    return type(label, (Plain,), {"name": label, **attributes})()


def small_program() -> Program:
    return captured(Net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4))


# --- order -----------------------------------------------------------------------------------------------------------


def names_of(pipeline: Pipeline) -> list[str]:
    return [p.name for p in pipeline.passes]


def test_stages_order_passes_and_the_list_orders_the_rest() -> None:
    given_passes = [named("s", stage="step"), named("j2"), named("f", stage="forward"), named("j1")]
    assert names_of(Pipeline(given_passes)) == ["f", "j2", "j1", "s"]
    assert [p.name for p in Pipeline(given_passes).of("joint")] == ["j2", "j1"]


def test_after_changes_the_order_only_where_it_must() -> None:
    a, b, c = named("a", after=("c", "absent")), named("b"), named("c")
    assert names_of(Pipeline([a, b, c])) == ["b", "c", "a"]
    assert names_of(Pipeline([c, a, b])) == ["c", "a", "b"]


def test_a_circle_is_an_error_that_names_it() -> None:
    a, b, c = named("a", after=("b",)), named("b", after=("a",)), named("c")
    with pytest.raises(PipelineError, match=r"a \(after b\), b \(after a\)") as caught:
        Pipeline([c, a, b])
    assert "c (" not in str(caught.value)


def test_conflicts_requirements_and_duplicates_are_all_reported() -> None:
    a, b = named("a", conflicts=("b",)), named("b", requires=("c", "a"))
    with pytest.raises(PipelineError) as caught:
        Pipeline([a, b, Leveled(), Leveled(5), Plain, "text"])  # type: ignore[list-item]
    for part in (
        "'a' and 'b' cannot be used together",
        "'b' needs 'c'",
        "$.passes[3]: 'leveled' is given twice",
        "$.passes[4]: Plain is a class; give an object: Plain(...)",
        "$.passes[5]: there is no pass called 'text'",
    ):
        assert part in str(caught.value)
    assert "needs 'a'" not in str(caught.value)


def test_a_pass_of_the_step_stage_needs_the_whole_step() -> None:
    with pytest.raises(PipelineError, match="optimize_step"):
        graphopt.optimize(nn.Linear(2, 2), [named("late", stage="step")])


# --- the registry ----------------------------------------------------------------------------------------------------


def test_built_in_passes_are_registered_like_anyone_elses() -> None:
    assert find_pass("recompute") is Recompute
    assert list(available_passes()) == sorted(available_passes())
    assert Pipeline("recompute{checkpoints=a}").passes == (Recompute("a"),)


def test_an_unknown_pass_names_the_near_ones() -> None:
    with pytest.raises(PipelineError, match="no pass called 'recompte'; did you mean 'recompute'"):
        Pipeline("recompte{checkpoints=a}")
    with pytest.raises(PipelineError, match=r"known passes: .*recompute"):
        find_pass("zzz")


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from graphopt import Changed, Pass

@dataclass(frozen=True)
class Mine(Pass):
    name: ClassVar[str] = "mine"
    stage: ClassVar[str] = "joint"
    numerics: ClassVar[str] = "bitwise"
    level: int = 1

    def apply(self, program):
        return Changed(reason="nothing to do")
"""


def run_with_plugin(folder: Path, entries: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where a package registers ``entries`` in the group ``graphopt.passes``."""
    (folder / "plugin.py").write_text(PLUGIN)
    metadata = folder / "plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[graphopt.passes]\n{entries}\n")
    script = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.sweep
def test_a_plugin_brings_a_pass_by_its_entry_point(tmp_path: Path) -> None:
    code = (
        "from graphopt.rewriting.pipeline import Pipeline\n"
        "from graphopt.rewriting.registry import available_passes\n"
        "print(Pipeline('mine{level=4}'), list(available_passes()))"
    )
    done = run_with_plugin(tmp_path, "mine = plugin:Mine", code)
    assert done.stdout == f"mine{{level=4}} {sorted([*available_passes(), 'mine'])}\n", done.stderr


WRONG_ENTRIES = {
    "missing = plugin:absent": "plugin:absent",
    "absent = absent_module:Mine": "absent_module:Mine",
    "other = plugin:dataclass": "not a subclass of graphopt.Pass",
    "yours = plugin:Mine": "registered as 'yours' but calls itself 'mine'",
}

FIND_ALL = """
from graphopt import PipelineError
from graphopt.rewriting.registry import find_pass
for name in {names}:
    try:
        find_pass(name)
    except PipelineError as error:
        print(name, error)
"""


@pytest.mark.sweep
def test_a_wrong_entry_point_is_an_error_that_names_it(tmp_path: Path) -> None:
    code = FIND_ALL.format(names=[entry.split()[0] for entry in WRONG_ENTRIES])
    done = run_with_plugin(tmp_path, "\n".join(WRONG_ENTRIES), code)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stdout.splitlines(), WRONG_ENTRIES.values(), strict=True):
        assert message in line


@pytest.mark.sweep
def test_two_packages_with_one_name_are_an_error(tmp_path: Path) -> None:
    done = run_with_plugin(tmp_path, "recompute = plugin:Mine", FIND_ALL.format(names=["recompute"]))
    assert "two installed packages register a pass called 'recompute': " in done.stdout, done.stderr
    assert "plugin:Mine (from plugin)" in done.stdout


# --- running ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Writes down what an instrument is told."""

    def __init__(self, label: str, events: list[str]) -> None:
        self.label, self.events = label, events

    def before_pass(self, current: Pass, program: Program) -> None:
        self.events.append(f"{self.label} before {current.name}")

    def after_pass(self, current: Pass, program: Program, record: PassRecord) -> None:
        assert record.name == current.name
        assert program.history[-1] == record.spec
        self.events.append(f"{self.label} after {current.name}")

    def failed_pass(self, current: Pass, before: Program, error: Exception) -> None:
        self.events.append(f"{self.label} failed {current.name}: {error}")


@final
@dataclass(frozen=True)
class Fails(Plain):
    name: ClassVar[str] = "fails"

    def apply(self, program: Program) -> Changed:
        next(program.phase_nodes(Phase.BACKWARD)).name = "broken"
        raise ZeroDivisionError("by design")


def test_instruments_run_around_each_pass_in_the_order_given() -> None:
    events: list[str] = []
    both = [Recorder("1", events), Recorder("2", events)]
    records = Pipeline([named("a"), named("s", stage="step"), named("b")]).run(small_program(), instruments=both)
    assert [record.name for record in records] == ["a", "b"]
    assert events == [f"{i} {when} {p}" for p in "ab" for when in ("before", "after") for i in "12"]


def test_a_pass_of_two_stages_that_is_done_at_the_first_is_not_run_again() -> None:
    def concerns(self: Pass, program: Program) -> bool:
        return str(self) not in program.history

    once = named("once", also=("last",), concerns=concerns)
    records = Pipeline([once, named("other", also=("last",))]).run(small_program())
    assert [record.spec for record in records] == ["once", "other", "other"]


def test_a_pass_that_raises_keeps_the_cause_and_is_named() -> None:
    events: list[str] = []
    program = small_program()
    with pytest.raises(PassError, match="'fails', failed: ZeroDivisionError: by design") as caught:
        Pipeline([named("a"), Fails()]).run(program, instruments=[Recorder("1", events)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__notes__ == ["pipeline: a, >>> fails <<<"]
    assert events[-1] == "1 failed fails: by design"
    assert program.history == ("a",)


def test_a_pass_must_say_what_it_did() -> None:
    with pytest.raises(PassError, match="apply returned NoneType; pass developer: return a Changed"):
        Pipeline([named("silent", apply=lambda self, program: None)]).run(small_program())


def test_changed_is_true_where_something_was_done() -> None:
    assert not Changed()
    assert not Changed(counts={"recomputed": 0}, reason="why")
    assert Changed(counts={"recomputed": 0, "kept": 2})
    assert str(Changed(reason="why")) == "nothing: why"
    assert str(Changed(counts={"recomputed": 3, "kept": 2})) == "3 recomputed, 2 kept"


def test_the_record_has_sizes_peaks_and_bytes_saved() -> None:
    model = Net(*(m for _ in range(6) for m in (nn.Linear(8, 8), nn.GELU())))
    program = captured(model, torch.randn(256, 8))
    nodes, peak = len(program.nodes), program.memory().peak_bytes
    (record,) = Pipeline([Recompute(["net.3", "net.7"])]).run(program)
    assert (record.nodes_before, record.nodes_after) == (nodes, len(program.nodes))
    assert (record.peak_before, record.peak_after) == (peak, program.memory().peak_bytes)
    assert record.changed.bytes_saved == peak - program.memory().peak_bytes > 0
    assert program.history == (record.spec,) == ("recompute{checkpoints=net.3,net.7}",)


def test_snapshots_are_copies_and_logs_are_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="graphopt")
    program, snapshots = small_program(), Snapshots()
    Pipeline([named("a"), Recompute("net.1")]).run(program, instruments=[snapshots, LogPasses()])
    assert [label for label, _ in snapshots.programs] == ["a", "recompute{checkpoints=net.1}"]
    assert snapshots.programs[0][1].nodes[0] is not program.nodes[0]
    records = [record for record in caplog.records if record.name.startswith("graphopt.")]
    levels = {record.message.split(":")[0]: record.levelname for record in records}
    assert levels["a"] == "WARNING"


def test_a_pass_can_wrap_a_function_on_a_graph_module() -> None:
    from graphopt import FxPass

    def swap(module: torch.fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sin.default

    program = small_program()
    (record,) = Pipeline([FxPass(swap)]).run(program)
    assert record.changed
    assert "sin" in [str(n.target).split(".")[1] for n in program.nodes if n.op == "call_function"]
