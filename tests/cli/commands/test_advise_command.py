"""``graphopt advise``: a pipeline that can be pasted, and what is wrong with arguments."""

from __future__ import annotations

import pytest

from tests.cli.commands.test_plan_of_ranks import STEP
from tests.support.command import Command

MACHINE = ("--device", "h100-80gb", "--devices", "16", "--network", "1Gbit")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_the_first_line_is_what_passes_takes(run: Command) -> None:
    outcome = run("advise", STEP, *MACHINE, "--memory", "30GB")
    assert outcome.code == 0, outcome.err
    first, second, *_ = outcome.out.splitlines()
    assert second.startswith("for                  16 x h100-80gb, 29.5 GB for the program")
    pipeline = first.removeprefix("passes").strip()
    planned = run("plan", STEP, *MACHINE, "--passes", pipeline, "--json")
    advised = run("advise", STEP, *MACHINE, "--memory", "30GB", "--json")
    assert planned.code == advised.code == 0, planned.err + advised.err
    assert advised.data["pipeline"] == pipeline
    assert advised.data["step"] == planned.data["step"]
    assert advised.data["beside_bytes"] == 30 * 10**9 - advised.data["budget_bytes"]


def test_the_rows_of_a_call_are_chosen_for_a_global_batch(run: Command) -> None:
    outcome = run("advise", STEP, *MACHINE, "--memory", "30GB", "--global-batch", "128", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.data["rows"] * outcome.data["accumulation"] * 16 == 128
    refused = run("advise", STEP, *MACHINE, "--memory", "30GB", "--global-batch", "100")
    assert refused.code == 2
    assert "--global-batch 100 is not a multiple of --devices 16" in refused.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--numerics", "bitwize"), "bitwise"),
        (("--memory", "8 apples"), "8 apples"),
        (("--network", "1Gbit"), "give --devices too"),
        (("--devices", "8"), "--device names"),
        (("--device", "h101"), "h100-80gb"),
        (("--device", "h100-80gb", "--memory", "1MB"), "not enough for the driver"),
        (("--device", "h100-80gb", "--tokens", "8"), "hf:config.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments_say_what_to_write(run: Command, argv: tuple[str, ...], words: str) -> None:
    outcome = run("advise", STEP, *argv)
    assert outcome.code == 2
    assert words in outcome.err


def test_a_machine_that_cannot_hold_the_model_says_how_many_could(run: Command) -> None:
    outcome = run("advise", STEP, "--device", "h100-80gb", "--memory", "540MB")
    assert outcome.code == 1
    assert "the least that one of h100-80gb has to hold" in outcome.err
