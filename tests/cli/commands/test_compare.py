from __future__ import annotations

import json

import pytest
from expecttest import assert_expected_inline

from graphopt.passes import Recompute
from graphopt.passes.mixed_precision import MixedPrecision
from graphopt.runtime.comparison.trial import Trial
from tests.support.command import Command, Idle, install, target
from tests.support.low_precision import LowLinear
from tests.support.paths import SUPPORT

FILE = SUPPORT / "low_precision.py"
LOW = "low-linear{dtype=float16}"


def low(name: str) -> str:
    return f"{FILE}:{name}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    install(monkeypatch, LowLinear, MixedPrecision, Recompute, Idle)
    return Command(capsys)


def table(text: str) -> str:
    """The output without the lines of the passes, which hold times."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


# --- the table -------------------------------------------------------------------------------------------------------


def test_table(run: Command) -> None:
    outcome = run("compare", low("overflowing"), "--passes", LOW, "--limit", "7")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("# low-linear{dtype=float16}: 5 low precision ops; ")
    assert_expected_inline(
        table(outcome.out),
        """\
12 tensors, worst first, 4 of them bitwise equal; relative errors are ‖after - before‖ / ‖before‖ in the 2-norm

tensor            kind      type              max error  relative  overflow
layers.2          value     f32 -> f16[2, 4]        inf       inf    100.0%
layers.3          value     f32 -> f16[2, 4]        inf       inf    100.0%
layers.4          value     f32 -> f16[2, 4]        inf       inf    100.0%
loss              loss      f32[]                   inf       inf    100.0%
layers.4.weight~  gradient  f32[4, 4]               inf       inf    100.0%
layers.3.weight~  gradient  f32[4, 4]               inf       inf    100.0%
layers.0          value     f32 -> f16[2, 4]          0         0
and 5 more, none of them worse""",
    )


def test_table_of_a_whole_step(run: Command) -> None:
    outcome = run("compare", low("training"), "-p", "low-linear", "--tensors", "layers.0*", "--tensors", "loss")
    assert_expected_inline(
        table(outcome.out),
        """\
2 tensors, worst first, 1 of them bitwise equal; relative errors are ‖after - before‖ / ‖before‖ in the 2-norm

tensor    kind   type               max error       relative
layers.0  value  f32 -> bf16[2, 4]          0              0
loss      loss   f32[]                      0  bitwise equal""",
    )


def test_equal_programs(run: Command) -> None:
    outcome = run("compare", target("step"), "-p", "recompute{checkpoints=blocks.*}", "--tensors", "blocks.?")
    assert_expected_inline(
        table(outcome.out),
        """\
all 3 tensors are bitwise equal

tensor    kind   type        max error       relative
blocks.0  value  f32[16, 8]          0  bitwise equal
blocks.1  value  f32[16, 8]          0  bitwise equal
blocks.2  value  f32[16, 8]          0  bitwise equal""",
    )


@pytest.mark.sweep
def test_a_drop_in_program_and_a_pass_that_does_nothing(run: Command) -> None:
    outcome = run("compare", target("plain"), "-p", "idle", "--limit", "0")
    assert outcome.code == 0
    assert "all 24 tensors are bitwise equal\nand 24 more" in outcome.out
    assert "idle: nothing: there is no work" in outcome.err


@pytest.mark.sweep
def test_the_joint_stage_of_a_whole_step(run: Command) -> None:
    data = run("compare", low("training"), "-p", LOW, "--stage", "joint", "--json").data
    assert data["stage"] == "joint"
    assert {row["kind"] for row in data["tensors"]} == {"value", "loss", "gradient"}


def test_data(run: Command) -> None:
    data = run("compare", low("overflowing"), "-p", LOW, "--json", "--limit", "2").data
    assert (data["title"], data["version"], data["bitwise"], data["compared"]) == ("Chain", 1, False, 12)
    assert [entry["spec"] for entry in data["passes"]] == [LOW]
    assert data["skipped"] == []
    assert len(data["tensors"]) == 2
    assert data["tensors"][0] == {
        "name": "layers.2", "kind": "value", "shape": [2, 4], "dtype_before": "float32", "dtype_after": "float16",
        "max_error": "inf", "relative_error": "inf", "overflow": 1.0, "underflow": 0.0, "bitwise": False,
    }  # fmt: skip


@pytest.mark.sweep
def test_tolerance(run: Command) -> None:
    fine = run("compare", low("exact"), "-p", LOW, "--tolerance", "1e-9")
    assert (fine.code, fine.err) == (0, "")
    over = run("compare", low("overflowing"), "-p", LOW, "--tolerance", "0.01", "--json")
    assert over.code == 1
    assert json.loads(over.out)["exceeding"] == [
        "layers.2", "layers.3", "layers.4", "loss", "layers.4.weight~", "layers.3.weight~",
    ]  # fmt: skip
    assert over.err == (
        "graphopt: error: 6 tensors are not within the tolerance of 0.01; "
        "the worst is 'layers.2' with a relative error of inf\n"
    )
    one = run("compare", low("overflowing"), "-p", LOW, "--tolerance", "0.01", "--tensors", "loss")
    assert one.err.startswith("graphopt: error: 1 tensor is not within")
    assert run("compare", low("overflowing"), "-p", LOW, "--tolerance", "0.01", "--tensors", "layers.0").code == 0


def test_an_unknown_tensor_is_an_error_with_near_names(run: Command) -> None:
    outcome = run("compare", low("exact"), "-p", LOW, "--tensors", "layer.0")
    assert (outcome.code, outcome.out) == (1, "")
    assert "graphopt: error: 'layer.0' names no tensor that both programs have; did you mean 'layers.0'" in outcome.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "-p/--passes"),
        (("-p", "a", "--tolerance", "-1"), "'-1' is not a relative error"),
        (("-p", "a", "--bisect", "much"), "'much' is not a relative error: write 0.01 or 1e-3"),
        (("-p", "a", "--bisect", "1", "--tolerance", "1"), "not allowed with"),
        (("-p", "a", "--by", "op"), "give --bisect too"),
        (("-p", "a", "--stage", "forward"), "invalid choice: 'forward'"),
        (("-p", "a", "--limit", "-1"), "is not a whole number"),
    ],
)
def test_wrong_arguments_exit_with_2(run: Command, argv: tuple[str, ...], message: str) -> None:
    outcome = run("compare", "x:y", *argv)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_help_has_an_example(run: Command) -> None:
    outcome = run("compare", "--help")
    assert outcome.code == 0
    assert "graphopt compare examples/train_gpt.py:factory" in outcome.out


# --- what to keep in float32 -----------------------------------------------------------------------------------------


def test_bisection(run: Command) -> None:
    outcome = run("compare", low("unfit"), "-p", LOW, "--bisect", "0.001")
    assert (outcome.code, outcome.err) == (0, "")
    assert_expected_inline(
        outcome.out,
        """\
the loss and all gradients within 0.001: 1 of 5 modules in float32 (5 trials)
verified: allowing any one of them again breaks the tolerance
  layers.2

--passes 'low-linear{dtype=float16 deny=layers.2}'
""",
    )


@pytest.mark.sweep
def test_what_bisection_prints_can_be_pasted(run: Command) -> None:
    given = "low-linear{dtype=float16},recompute{checkpoints=layers.*}"
    found = run("compare", low("overflowing"), "-p", given, "--bisect", "0.001", "--json").data
    assert (found["deny"], found["minimal"], found["interrupted"]) == (["layers.2", "layers.3"], True, False)
    passes = found["passes_with_deny"]
    assert passes == "low-linear{dtype=float16 deny=layers.2,layers.3},recompute{checkpoints=layers.*}"
    assert run("compare", low("overflowing"), "-p", passes, "--tolerance", "0.001").code == 0
    for entry in found["deny"]:
        fewer = "low-linear{dtype=float16 deny=" + entry + "},recompute{checkpoints=layers.*}"
        assert run("compare", low("overflowing"), "-p", fewer, "--tolerance", "0.001").code == 1


@pytest.mark.sweep
def test_bisection_by_op_and_for_chosen_tensors(run: Command) -> None:
    by_op = run("compare", low("unfit"), "-p", LOW, "--bisect", "0.001", "--by", "op")
    assert "1 of 1 op in float32" in by_op.out
    assert "deny=linear}" in by_op.out
    first = run("compare", low("unfit"), "-p", LOW, "--bisect", "0.001", "--tensors", "layers.0")
    assert first.out.splitlines()[:2] == [
        "layers.0 within 0.001: 0 of 5 modules in float32 (2 trials)", "nothing has to be kept in float32",
    ]  # fmt: skip


def test_bisection_without_a_pass_that_can_deny(run: Command) -> None:
    outcome = run("compare", target("plain"), "-p", "recompute{checkpoints=a}", "--bisect", "1")
    assert outcome.code == 2
    assert "a pass with the option deny, such as mixed-precision, and these are recompute{checkpoints=a}" in outcome.err


@pytest.mark.sweep
def test_bisection_that_cannot_succeed(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.cli.commands.compare.deniable", lambda *_: ["layers.0"])
    outcome = run("compare", low("unfit"), "-p", LOW, "--bisect", "0.001")
    assert (outcome.code, outcome.out) == (1, "")
    assert "with all that can be denied (1 by module) the relative error of 'loss' is still inf" in outcome.err


@pytest.mark.sweep
def test_an_interrupted_bisection_shows_the_best_set(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[object] = []
    within = Trial.within

    def interrupted(self: Trial, *args: object, **options: object) -> bool:
        trials.append(args)
        if len(trials) == 4:
            raise KeyboardInterrupt
        return within(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Trial, "within", interrupted)
    outcome = run("compare", low("unfit"), "-p", LOW, "--bisect", "0.001")
    assert outcome.code == 0
    assert "interrupted: a smaller set may do; this one was tried and holds the tolerance" in outcome.out
    assert "  layers.2\n" in outcome.out
