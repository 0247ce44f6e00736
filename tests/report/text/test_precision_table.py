from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphopt import Pass, Pipeline, Program
from graphopt.capture import CaptureSession
from graphopt.cli.target.programs import before_passes
from graphopt.ir.state import PassState
from graphopt.passes import Recompute
from graphopt.passes.mixed_precision import MixedPrecision
from graphopt.passes.scale_loss import ScaleLoss
from graphopt.report.text.precision_table import (
    LEVELS,
    bytes_by_category,
    changes_precision,
    level_of,
    precision_json,
    precision_text,
)
from graphopt.runtime.programs.rewrite import rewrite
from tests.support.command import Command, install, target
from tests.support.low_precision import LowLinear
from tests.support.training import mean_square


class Deep(nn.Module):
    """Two layers with an activation that backward reads, and a mask."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(torch.tanh(self.first(x)), self.p))


def pair(model: nn.Module, *passes: Pass, optimizer: Any = None) -> tuple[Program, Program]:
    """The plain program of a batch of 64 rows, and what passes make of it."""
    session = CaptureSession(model, (torch.randn(64, 16),), loss=mean_square, optimizer=optimizer)
    rewritten = rewrite(session, Pipeline(passes), until="joint" if optimizer is None else "step")
    return before_passes(rewritten), rewritten.program


PARAMETERS = 16 * 32 + 32 + 32 * 8 + 8


def test_bytes_of_a_step() -> None:
    model = Deep()
    plain, low = pair(model, MixedPrecision(), optimizer=torch.optim.Adam(model.parameters(), fused=True))
    found = bytes_by_category(plain)
    assert (found.parameters, found.trained) == (PARAMETERS, PARAMETERS)
    assert (found.weights, found.gradients) == (4 * PARAMETERS, 4 * PARAMETERS)
    assert found.state == 8 * PARAMETERS + 4 * 4 + 8  # moments, a step count for each tensor, the learning rate
    assert found.values == 64 * 32 + 64 * 8 + 1  # what tanh gives, the square's argument, the loss
    assert found.activations == 4 * found.values
    assert (found.copies, found.other, found.pass_state) == (0, 0, 0)
    assert found.total == found.weights + found.gradients + found.state + found.activations
    new = bytes_by_category(low)
    assert (new.weights, new.gradients, new.state) == (found.weights, found.gradients, found.state)
    low_values = 64 * 16 + 64 * 32 + 64 * 8  # a copy of the batch, what tanh gives, the output; the loss is float32
    assert new.activations == 2 * low_values + 4


def test_masks_frozen_parameters_and_what_passes_hold() -> None:
    model = Deep(p=0.5)
    model.first.requires_grad_(False)
    plain, low = pair(model, ScaleLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = bytes_by_category(plain)
    assert found.trained == 32 * 8 + 8
    assert found.gradients == 4 * found.trained
    assert (found.other, found.pass_state) == (0, 0)  # nothing before the mask is trained
    held = bytes_by_category(low).pass_state
    assert held == sum(4 * max(1, *item.shape, 1) for item in low.pass_state.values())
    text = precision_text(plain, low)
    assert f"P = {PARAMETERS} parameters, T = 264 of them trained" in text
    assert "plain  4 P + 4 T + 4 N" in text
    trained = pair(Deep(p=0.5))[0]
    assert bytes_by_category(trained).other == 64 * 32  # a mask of bytes


def test_held_copies_of_weights_count_as_weights_in_low_precision() -> None:
    _, program = pair(Deep())
    shape = (32, 16)
    program.add_state("o2/first.weight", PassState(shape, torch.bfloat16, torch.device("cpu"), source="first.weight"))
    program.add_state("scale", PassState((), torch.float32, torch.device("cpu"), fill=2.0))
    found = bytes_by_category(program)
    assert (found.copies, found.pass_state) == (2 * 32 * 16, 4)


def test_text() -> None:
    model = Deep()
    programs = pair(model, MixedPrecision(level="O2"), optimizer=torch.optim.Adam(model.parameters(), fused=True))
    assert_expected_inline(
        precision_text(*programs, level="O2"),
        """\
P = 808 parameters
N = 2,561 floating-point values that forward keeps for backward, in the plain program

                            plain        formula  rewritten    formula O2
weights                    3.2 kB   4 P = 3.2 kB     3.2 kB  4 P = 3.2 kB
weights in low precision      0 B                    1.6 kB  2 P = 1.6 kB
gradients                  3.2 kB   4 P = 3.2 kB     3.2 kB  2 P = 1.6 kB
optimizer state            6.5 kB   8 P = 6.5 kB     6.5 kB  8 P = 6.5 kB
activations               10.2 kB  4 N = 10.2 kB     7.2 kB  2 N = 5.1 kB
together                  23.2 kB        23.2 kB    21.7 kB       18.1 kB

known formulas, with 8 bytes of optimizer state for each trained parameter
  plain  16 P + 4 N  = 23.2 kB
  O1     16 P + 2 N  = 18.1 kB  and 2 P = 1.6 kB more while it runs
  O2     16 P + 2 N  = 18.1 kB
""",
    )


@pytest.mark.sweep
def test_text_without_a_known_formula() -> None:
    text = precision_text(*pair(Deep(), LowLinear()))
    head = next(line for line in text.splitlines() if "rewritten" in line)
    assert head.split() == ["plain", "formula", "rewritten"]
    assert "plain  8 P + 4 N" in text


def test_data() -> None:
    plain, low = pair(Deep(), MixedPrecision())
    data = precision_json(plain, low, "O1")
    values = 64 * 32 + 64 * 8 + 1
    assert (data["parameters"], data["activation_values"], data["level"]) == (PARAMETERS, values, "O1")
    assert data["before"]["activations"] == 4 * values
    assert data["before"]["together"] == 8 * PARAMETERS + 4 * values
    assert data["formulas"] == {
        "plain": {"formula": "8 P + 4 N", "bytes": 8 * PARAMETERS + 4 * values, "while_running_bytes": 0},
        "O1": {
            "formula": "8 P + 2 N", "bytes": 8 * PARAMETERS + 2 * values, "while_running_bytes": 2 * PARAMETERS,
        },
        "O2": {"formula": "8 P + 2 N", "bytes": 8 * PARAMETERS + 2 * values, "while_running_bytes": 0},
    }  # fmt: skip


@pytest.mark.parametrize(("level", "letters"), [("plain", (16, 4)), ("O1", (16, 2)), ("O2", (16, 2))])
def test_the_known_formulas_with_adam(level: str, letters: tuple[int, int]) -> None:
    """Micikevicius et al. 2018, Rajbhandari et al. 2020: 16 bytes for each parameter with Adam, in every level."""
    known = LEVELS[level]
    lasting = known.copies if known.lasting else 0
    assert (known.weights + lasting + known.gradients + 8, known.activations) == letters


@pytest.mark.sweep
def test_what_changes_precision() -> None:
    assert changes_precision(*pair(Deep(), MixedPrecision()))
    assert changes_precision(*pair(Deep(), LowLinear(deny=("first",))))
    assert not changes_precision(*pair(Deep(), Recompute("first")))
    assert not changes_precision(*pair(Deep(), LowLinear(deny=("linear",))))


def test_level() -> None:
    assert level_of([Recompute("a"), MixedPrecision(level="O2")]) == "O2"
    assert level_of([LowLinear()]) is None


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    install(monkeypatch, MixedPrecision, LowLinear, Recompute)
    return Command(capsys)


@pytest.mark.sweep
def test_memory_explains_precision_where_a_dtype_changes(run: Command) -> None:
    outcome = run("memory", target("step"), "-p", "mixed-precision{level=O2}")
    assert outcome.code == 0
    text = outcome.out[outcome.out.index("==== precision\n") :]
    assert "P = 876 parameters\n" in text
    assert "formula O2" in text
    assert "plain  16 P + 4 N  = 22.0 kB" in text
    assert "O1     16 P + 2 N  = 18.0 kB  and 2 P = 1.8 kB more while it runs" in text


@pytest.mark.sweep
def test_memory_is_silent_about_precision_otherwise(run: Command) -> None:
    assert "precision" not in run("memory", target("step"), "-p", "recompute{checkpoints=blocks.*}").out
    assert "precision" not in run("memory", target("step"), "--json").data
    assert "==== precision" not in run("memory", target("plain"), "--stage", "forward", "--precision").out


@pytest.mark.sweep
def test_memory_explains_precision_when_asked(run: Command) -> None:
    alone = run("memory", target("plain"), "--precision").out
    assert "plain  8 P + 4 N" in alone[alone.index("==== precision\n") :]
    data = run("memory", target("step"), "-p", "recompute{checkpoints=blocks.*}", "--precision", "--json").data
    assert data["precision"]["level"] is None
    assert data["precision"]["before"]["activations"] > data["precision"]["after"]["activations"]


@pytest.mark.sweep
def test_memory_explains_precision_as_data(run: Command) -> None:
    data = run("memory", target("step"), "-p", "mixed-precision", "--json").data["precision"]
    assert (data["parameters"], data["level"]) == (876, "O1")
    assert data["formulas"]["O1"]["formula"] == "16 P + 2 N"
    assert data["after"]["activations"] < 0.6 * data["before"]["activations"]
