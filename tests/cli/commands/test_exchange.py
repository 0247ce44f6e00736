"""``graphopt plan --world-size``: the dry run of gradient exchange."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from graphopt.report.text.exchange_table import exchange_json, exchange_text
from graphopt.rewriting.distributed.prediction.advice import plan_exchange
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.workload import Rates, workload_of
from tests.support.command import RECOMPUTE, Command, Outcome, target
from tests.support.exchanging import plain_step, wide, workload
from tests.support.training import mean_square

COST = "a100-80gb"
"""Seconds that no machine's load changes."""

FILE = f"{__file__}:step"
NETWORK = ("--world-size", "4", "--bandwidth", "100Mbit")
LABELS = [
    "dense, per tensor", "dense, fused", "bfloat16", "PowerSGD, rank 1", "sharded update", "sharded parameters",
    "sharded parameters, that stay", "sparse, 25 %", "sparse, 6.25 %", "sparse, 1.5625 %", "sparse, 0.4 %",
    "sparse, 0.1 %", "local SGD, k = 4", "local SGD, k = 8", "local SGD, k = 16",
    "DiLoCo, every 100",
]  # fmt: skip


def step() -> dict[str, Any]:
    """A target: a whole step whose large gradients can be exchanged sparsely, and buffers."""
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return {"model": model, "example_inputs": (torch.zeros(8, 64),), "loss": mean_square, "optimizer": optimizer}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def planned(run: Command, *argv: object, of: str = FILE) -> Outcome:
    return run("plan", of, "--cost", COST, *NETWORK, *argv)


def rows(text: str) -> list[list[str]]:
    """The table's rows: cells are two blanks apart."""
    _, _, after = text.partition("per step and rank\n")
    table = after.split("\nputs in:")[0]
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def section(text: str, title: str) -> list[str]:
    """The lines below a heading."""
    _, _, after = text.partition(f"==== {title}")
    return after.split("\n\n")[0].splitlines()[1:]


def test_every_way_has_a_row(run: Command) -> None:
    outcome = planned(run)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "Sequential, step stage; passes: none"
    assert lines[1] == "network      4 ranks, 100 Mbit/s per rank, 50 us per round (ring)"
    assert "exchanged    8 gradients of 239.0 kB, and buffers of 2.4 kB" in lines
    head, *found = rows(outcome.out)
    assert head[:3] == ["way", "messages", "puts in"]
    assert [row[0].removesuffix(" <-") for row in found] == LABELS
    assert sum(row[0].endswith(" <-") for row in found) == 1
    assert found[0][1:3] == ["9", "241.4 kB"]
    assert found[1][1:3] == ["2", "241.4 kB"]


def test_devices_on_a_network_with_hosts(run: Command) -> None:
    """As ``--world-size``, with what the device's profile says of its hosts."""
    argv = ("plan", FILE, "--device", "h100-80gb", "--devices", "64", "--network", "100Gbit")
    outcome = run(*argv)
    assert (outcome.code, outcome.err) == (0, "")
    head = "network      64 ranks, 100 Gbit/s per rank, 50 us per round (ring)"
    assert outcome.out.splitlines()[1] == f"{head}; 2.7 Tbit/s per rank between the 8 of a host"
    labels = [row[0].removesuffix(" <-") for row in rows(outcome.out)[1:]]
    assert [label for label in labels if "in each host" in label] == [
        "sharded update, in each host", "sharded parameters, in each host"
    ]  # fmt: skip
    profile = run("plan", FILE, "--device", "h100-80gb", "--world-size", "64", "--json").data
    assert profile["link"] == {
        "bandwidth": 0.75 * 50e9, "latency": 50e-6, "algorithm": "ring",
        "host": {"ranks": 8, "bandwidth": 0.75 * 450e9, "latency": 0.0},
    }  # fmt: skip
    described = ("--host-ranks", "2", "--host-bandwidth", "10GB/s", "--host-latency", "2us", "--json")
    assert planned(run, *described).data["link"]["host"] == {"ranks": 2, "bandwidth": 10e9, "latency": 2e-6}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*NETWORK, "--host-bandwidth", "10GB/s"), "--host-bandwidth needs --host-ranks"),
        ((*NETWORK, "--host-ranks", "8"), "need --host-bandwidth"),
        ((*NETWORK, "--host-latency", "0"), "need --host-bandwidth"),
        (("--host-ranks", "8"), "--host-ranks describes an exchange of gradients: give --world-size too"),
        ((*NETWORK, "--host-ranks", "1"), "is not a number of ranks"),
        (("--device", "rtx-4090", "--world-size", "4"), "the profile of --device rtx-4090 does not say"),
        (("--device", "rtx-4090", *NETWORK, "--host-ranks", "4"), "give --host-bandwidth too: the profile of"),
        (("--device", "rtx-4090", *NETWORK, "--host-bandwidth", "1GB/s"), "give --host-ranks too: the profile of"),
        (
            (*NETWORK, "--device", "h100-80gb", "--devices", "8", "--budget", "1GB"),
            "--world-size 4 and --devices 8 differ",
        ),
    ],
)
def test_what_is_said_of_hosts_has_to_be_whole(run: Command, argv: tuple[str, ...], message: str) -> None:
    outcome = run("plan", FILE, *argv)
    assert outcome.code != 0
    assert message in outcome.err


def test_the_text_says_what_to_use_and_why(run: Command) -> None:
    out = planned(run).out
    (heading,) = [line for line in out.splitlines() if line.startswith("==== use ")]
    (marked,) = [row[0] for row in rows(out) if row[0].endswith(" <-")]
    assert heading.endswith(f": {marked.removesuffix(' <-')}")
    told = section(out, "use ")
    assert re.match(r"its step takes \S+ \S+, \S+ times the computation alone: it moves ", told[0])
    evens = section(out, "where one overtakes the other")
    assert evens[0].startswith("sparse, 0.1 %, bandwidth: faster than fused dense exchange below ")
    assert "fewer bytes than dense exchange below 1000 ranks" in evens[1]
    assert re.match(r"local SGD, interval: faster than fused dense exchange from k = \d+ on; from k = \d+ on", evens[2])


@pytest.mark.sweep
def test_what_stays_dense_is_listed_with_its_bytes(run: Command) -> None:
    kept = section(planned(run).out, "what stays dense in sparse exchange")
    assert kept[0].startswith("6 of 8 gradients, 6.2 kB of 239.0 kB: vectors, fewer than 16384 elements")
    assert [re.split(r"  +", line.strip()) for line in kept[1:]] == [
        ["5.weight", "2.1 kB", "520 elements"], ["1.weight", "1.2 kB", "one dimension"],
        ["1.bias", "1.2 kB", "one dimension"], ["0.bias", "1.2 kB", "one dimension"],
        ["3.bias", "520 B", "one dimension"], ["5.bias", "16 B", "one dimension"],
    ]  # fmt: skip


@pytest.mark.sweep
def test_the_same_as_data(run: Command) -> None:
    outcome = planned(run, "--latency", "1ms", "--density", "1%", "--k-steps", "32,2", "--algorithm", "tree", "--json")
    data = outcome.data
    plan = plan_exchange(
        workload_of(plain_step(wide()), COST), 4, Link(12.5e6, 1e-3, "tree"), density=0.01, k_steps=(2, 32)
    )
    expected = exchange_json(plan)
    volatile = ("title", "computation", "gradients", "ways", "use", "local_sgd")
    assert {k: v for k, v in data.items() if k not in volatile} == {
        k: v for k, v in expected.items() if k not in volatile
    }
    assert data["schema"] == 1
    assert data["link"] == {"bandwidth": 12.5e6, "latency": 1e-3, "algorithm": "tree", "host": None}
    assert [way["way"] for way in data["ways"]][-4:] == [
        "sparse, 1 %", "local SGD, k = 2", "local SGD, k = 32", "DiLoCo, every 100",
    ]  # fmt: skip
    for found, other in zip(data["ways"], expected["ways"], strict=True):
        assert found.keys() == other.keys()
        figures = {key: value for key, value in other.items() if isinstance(value, float)}
        assert {key: found[key] for key in figures} == pytest.approx(figures, rel=1e-9)
    assert data["computation"]["seconds"] == pytest.approx(plan.workload.compute)
    assert {gradient["name"]: gradient["bytes"] for gradient in data["gradients"]} == {
        gradient.name: gradient.bytes for gradient in plan.workload.gradients
    }


def test_ten_thousand_ranks(run: Command) -> None:
    outcome = run("plan", FILE, "--cost", COST, "--world-size", "10000", "--bandwidth", "100Gbit")
    assert outcome.code == 0
    sparse = next(row for row in rows(outcome.out) if row[0].startswith("sparse, 0.1 %"))
    assert sparse[-1] == "as dense"
    assert "with 10000 it is not faster on this link" in outcome.out
    assert section(outcome.out, "what stays dense")[0].startswith("8 of 8 gradients")


@pytest.mark.sweep
def test_seconds_are_measured_unless_told_otherwise(run: Command) -> None:
    outcome = run("plan", FILE, *NETWORK, "--json")
    assert outcome.code == 0
    assert outcome.data["cost"] == "measured"
    assert "measured" in outcome.data["costs"]
    assert outcome.data["computation"]["seconds"] > 0


@pytest.mark.sweep
def test_passes_run_before_and_those_that_exchange_are_left_out(run: Command) -> None:
    outcome = planned(run, "-p", f"data-parallel,{RECOMPUTE}", "--json", of=target("step"))
    assert outcome.code == 0
    assert "data-parallel does not run: ways to exchange gradients are what is shown" in outcome.err
    assert outcome.data["passes"] == [RECOMPUTE]


@pytest.mark.sweep
def test_a_program_is_fitted_into_memory_before_its_exchange_is_planned(run: Command) -> None:
    fitted = f"fit-memory{{budget=75% cost={COST}}}"
    outcome = planned(run, "-p", fitted, "--json", of=target("step"))
    plain = planned(run, "--json", of=target("step"))
    assert outcome.data["passes"] == [fitted]
    assert outcome.data["computation"]["backward"] > plain.data["computation"]["backward"]
    assert outcome.data["ways"][1]["payload_bytes"] == plain.data["ways"][1]["payload_bytes"]


def test_drop_in_models_have_no_update(run: Command) -> None:
    outcome = planned(run, of=target("plain"))
    assert outcome.code == 0
    assert (
        "note         a drop-in program: all ways but dense exchange and that in 16 bits need a whole step"
        in outcome.out
    )
    assert "no gradient is a matrix of 16384 elements or more" in outcome.out
    assert "update 0 s" in outcome.out
    assert re.search(r"==== use (DataParallel\(\)|CompressGradients\(\"bf16\"\))", outcome.out)
    assert "in a whole step, LocalSGD(k_steps=16) would take " in outcome.out


@pytest.mark.sweep
def test_into_a_file(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "exchange.txt"
    outcome = planned(run, "-o", file)
    assert (outcome.code, outcome.out) == (0, "")
    assert f"wrote {file}" in outcome.err
    assert len(rows(file.read_text())) == 1 + len(LABELS)
    assert "there is no folder" in planned(run, "-o", tmp_path / "none" / "x.txt").err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--world-size", "4"), "--world-size needs --bandwidth, what one rank's link carries: --bandwidth 1Gbit"),
        (("--bandwidth", "1Gbit"), "--bandwidth describes an exchange of gradients: give --world-size too"),
        (("--k-steps", "4"), "--k-steps describes an exchange of gradients: give --world-size too"),
        (
            (*NETWORK, "-b", "60%"),
            "--budget for several ranks needs --device, whose seconds and links are planned with",
        ),
        ((*NETWORK, "--device", "h200", "-b", "60%", "--k-steps", "4"), "--k-steps is for comparing ways to exchange"),
        ((*NETWORK, "--time-limit", "1"), "nothing is searched with --world-size"),
        ((*NETWORK, "--format", "svg"), "with --world-size use text or json"),
        ((*NETWORK, "--format", "text", "--json"), "two formats"),
        (("--world-size", "1", "--bandwidth", "1Gbit"), "'1' is not a number of ranks that exchange gradients"),
        (("--world-size", "many", "--bandwidth", "1Gbit"), "'many' is not a number of ranks"),
        (("--world-size", "4", "--bandwidth", "1G"), "did you mean '1Gbit' or '1GB/s'?"),
        ((*NETWORK, "--latency", "50"), "did you mean '50us' or '50ms'?"),
        ((*NETWORK, "--density", "1"), "'1' is not a share above 0 and below 1: write 0.001 or 0.1%"),
        ((*NETWORK, "--density", "few"), "'few' is not a share"),
        ((*NETWORK, "--k-steps", "4,0"), "'4,0' is not a list of whole numbers above 0: write 4,8,16"),
        ((*NETWORK, "--algorithm", "star"), "invalid choice: 'star'"),
        ((*NETWORK, "--step-time", "350"), "'350' is not the time of a step: write 350ms or 1.2s"),
        ((*NETWORK, "--step-time", "0s"), "'0s' is not the time of a step"),
        (("--step-time", "350ms"), "--step-time describes an exchange of gradients: give --world-size too"),
    ],
)
def test_wrong_arguments_exit_with_2(run: Command, argv: tuple[str, ...], message: str) -> None:
    outcome = run("plan", "x:y", *argv)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_the_time_of_a_step_that_is_known_scales_all_computation(run: Command) -> None:
    plain, scaled = planned(run, "--json").data, planned(run, "--json", "--step-time", "350ms").data
    before, after = plain["computation"], scaled["computation"]
    assert after["seconds"] == pytest.approx(0.35)
    factor = after["seconds"] / before["seconds"]
    assert {part: after[part] / before[part] for part in ("forward", "backward", "update")} == pytest.approx(
        dict.fromkeys(("forward", "backward", "update"), factor)
    )
    for one, other in zip(plain["ways"], scaled["ways"], strict=True):
        assert other["work"] == pytest.approx(one["work"] * factor)
        assert other["sent_bytes"] == one["sent_bytes"]
        smaller = "sparse" in other["way"] or other["way"].startswith("sharded")  # each rank runs a part of the update
        assert other["step"] > 0.35 - (after["update"] if smaller else 0)
    assert "to 350 ms" in planned(run, "--step-time", "350ms").out


def test_targets_that_are_not_there_or_train_nothing(run: Command, tmp_path: Path) -> None:
    assert "did you mean 'step'" in planned(run, of=f"{__file__}:steps").err
    file = tmp_path / "frozen.py"
    file.write_text(
        "import torch\ndef build():\n    model = torch.nn.Linear(4, 4).requires_grad_(False)\n"
        "    return model, torch.zeros(2, 4, requires_grad=True)\n"
    )
    outcome = planned(run, of=f"{file}:build")
    assert outcome.code == 1
    assert outcome.err.startswith("graphopt: error: no parameter of Linear gets a gradient")


def test_help_says_what_is_planned_together(run: Command) -> None:
    words = " ".join(run("plan", "--help").out.replace("\\\n", " ").split())
    assert "memory and communication are planned together" in words
    assert "graphopt plan examples/train_gpt.py:factory --world-size 64 --bandwidth 1Gbit" in words
    assert "share of the elements that sparse exchange sends behind its warm-up: 0.001, 0.1% (default 0.001)" in words


# --- the report by itself --------------------------------------------------------------------------------------------


def test_long_lists_of_dense_gradients_are_cut() -> None:
    made = workload(*[(number + 1,) for number in range(20)])
    text = exchange_text(plan_exchange(made, 2, Link(1e9)), most=3)
    kept = section(text, "what stays dense in sparse exchange")
    assert [line.split()[0] for line in kept[1:4]] == ["p19", "p18", "p17"]
    assert kept[4] == "  and 17 more of 612 B"
    assert len(kept) == 5


def test_a_way_that_is_faster_at_any_bandwidth_or_at_none() -> None:
    cheap = exchange_text(plan_exchange(workload((1000, 1000), (1000, 1000)), 4, Link(1e6)))
    assert "sparse, 0.1 %, bandwidth: always faster than fused dense exchange with 4 ranks" in cheap
    ways = exchange_json(plan_exchange(workload((1000, 1000)), 4, Link(1e6)))["ways"]
    by_label = {way["way"]: way for way in ways}
    assert by_label["sparse, 0.1 %"]["faster_than_dense"] == "always"
    assert by_label["sparse, 0.1 %"]["faster_below_bandwidth"] is None
    assert by_label["sparse, 25 %"]["faster_than_dense"] == "never"
    assert "faster_than_dense" not in by_label["sharded update"]
    dear = workload((1000, 1000), (1000, 1000), rates=Rates(0.0, 1e-6))
    below = exchange_json(plan_exchange(dear, 4, Link(1e6)))["ways"][10]
    assert below["faster_than_dense"] == "below"
    assert below["faster_below_bandwidth"] > 0


def test_an_exchange_that_is_hidden_whole_is_said_to_be_so() -> None:
    made = workload((10, 10), (1,), backward=100.0)
    text = exchange_text(plan_exchange(made, 2, Link(1e15)))
    assert "==== use DataParallel(): dense, fused" in text
    assert re.search(r"local SGD, interval: .*on its exchange takes at most 5% of the computation", text)
