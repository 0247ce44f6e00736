"""``graphopt plan --devices``: memory and communication of several ranks in one plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphopt.analysis.costs.profiles import PROFILES, SLOWEST
from tests.support.command import Command
from tests.support.exchanging import wide
from tests.support.training import mean_square

DEVICE = "h100-80gb"
RANKS = ("--device", DEVICE, "--devices", "16")
ROWS, WIDTH = 8192, 1024


class Rotated(nn.Module):
    """Layers around a region that mixed precision leaves in float32, as models of ``transformers`` have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("angles", torch.arange(float(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            turned = (self.angles.float() * x.float()).cos()
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * turned.to(x.dtype)
        return x


def rotated() -> dict[str, Any]:
    model = Rotated()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return {"model": model, "example_inputs": (torch.zeros(ROWS, WIDTH),), "loss": mean_square, "optimizer": optimizer}


def step() -> dict[str, Any]:
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return {"model": model, "example_inputs": (torch.zeros(ROWS, 64),), "loss": mean_square, "optimizer": optimizer}


STEP, ROTATED = f"{__file__}:step", f"{__file__}:rotated"
SHARDED = "mixed-precision{dtype=bfloat16},data-parallel,shard-parameters{min-bytes=64}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def planned(run: Command, *argv: object, of: str = STEP) -> Any:
    outcome = run("plan", of, *RANKS, *argv, "--json")
    assert outcome.code == 0, outcome.err
    return outcome.data


def test_exchanges_take_what_their_bytes_do_on_the_network_that_is_named(run: Command) -> None:
    """By hand: an all-reduce sends 30/16 of the gradients' bytes, of which 1/15 leaves the host; a broadcast all."""
    bandwidth = 1e9 / 8
    found = planned(run, "--network", "1Gbit", "--latency", "0", "--passes", "data-parallel")["step"]
    size = sum(p.numel() * p.element_size() for p in wide().parameters() if p.requires_grad)
    floating = sum(b.numel() * b.element_size() for b in wide().buffers() if b.is_floating_point())
    sent = 2 * 15 / 16 * size
    assert found["sent_bytes"] == pytest.approx(sent + floating)
    assert sent / 15 / bandwidth > sent * 14 / 15 / PROFILES[DEVICE].peer_bandwidth
    assert found["exchanges"] == pytest.approx((sent / 15 + floating) / bandwidth)
    assert found["waited"] <= found["exchanges"]
    assert found["seconds"] == pytest.approx(found["compute"] + found["waited"])
    assert (found["ranks"], found["items"], found["unit"]) == (16, ROWS, "rows")
    assert found["rows_per_second_and_rank"] == pytest.approx(ROWS / found["seconds"])


def test_a_slower_network_is_waited_for_and_more_latency_too(run: Command) -> None:
    networks = (("100Gbit", "0"), ("1Gbit", "0"), ("1Gbit", "1ms"))
    found = [
        planned(run, "--network", network, "--latency", latency, "--passes", "data-parallel")["step"]["seconds"]
        for network, latency in networks
    ]
    assert all(faster < slower for faster, slower in itertools.pairwise(found))


def test_sharded_parameters_in_mixed_precision_within_a_budget(run: Command) -> None:
    """As the pass does it, which gathers around what is recomputed."""
    data = planned(run, "--passes", SHARDED, "--budget", "85%", of=ROTATED)
    assert data["step"]["peak_bytes"] == data["plain"]["peak_bytes"]
    (answer,) = data["budgets"]
    assert answer["feasible"]
    assert answer["runs_again"] > 0
    assert answer["step"]["peak_bytes"] == answer["peak_bytes"]
    assert answer["reserved_bytes"] <= answer["budget_bytes"]
    assert answer["ratio"] > 1
    assert any("gathered from all ranks" in line for line in answer["notes"])
    assert not any(line.startswith("nothing") for line in answer["notes"])
    budget = answer["budget_bytes"]
    argv = ("--passes", f"{SHARDED},fit-memory{{budget={budget}}}", "--json")
    outcome = run("memory", ROTATED, *RANKS, *argv)
    assert outcome.code == 0, outcome.err
    assert outcome.data["after"]["peak_bytes"] == answer["peak_bytes"] < data["plain"]["peak_bytes"]


def test_what_is_predicted_by_a_data_sheet_is_a_range(run: Command, tmp_path: Path) -> None:
    found = planned(run, "--network", "1Gbit", "--passes", "data-parallel")["step"]
    assert found["at_most"] == pytest.approx(SLOWEST * found["seconds"])
    assert found["rows_per_second_and_rank_at_least"] == pytest.approx(ROWS / found["at_most"])
    text = run("plan", STEP, *RANKS, "--network", "1Gbit", "--passes", "data-parallel").out
    assert f"{ROWS / found['at_most']:,.0f} to {ROWS / found['seconds']:,.0f} rows a second on each rank" in text
    mine = replace(PROFILES[DEVICE], name="mine", network_bandwidth=1e9).save(tmp_path / "mine.toml")
    outcome = run("plan", STEP, "--device", mine, "--devices", "16", "--passes", "data-parallel", "--json")
    assert outcome.data["step"]["at_most"] == outcome.data["step"]["seconds"]


@pytest.mark.sweep
def test_the_text_has_the_step_below_each_budget(run: Command) -> None:
    outcome = run("plan", ROTATED, *RANKS, "--passes", SHARDED, "--budget", "85%", "--budget", "99%")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert sum(line.startswith("step of 16 ranks") for line in lines) == 3
    assert sum(line.startswith("throughput") for line in lines) == 3


def test_where_nothing_says_what_joins_hosts_the_option_is_named(run: Command) -> None:
    argv = ("--device", "rtx-4090", "--devices", "4", "--passes", "data-parallel")
    outcome = run("plan", STEP, *argv)
    assert outcome.code == 1
    assert "the profile of rtx-4090 does not say what joins 4 devices: give --network" in outcome.err
    assert run("plan", STEP, *argv, "--network", "10Gbit").code == 0


def test_an_option_for_comparing_exchanges_is_refused_beside_passes_that_exchange(run: Command) -> None:
    argv = ("--network", "1Gbit", "--passes", "data-parallel")
    for option in (("--density", "0.1"), ("--k-steps", "4"), ("--step-time", "1s"), ("--algorithm", "tree")):
        outcome = run("plan", STEP, *RANKS, *argv, *option)
        assert outcome.code == 2
        assert f"{option[0]} is for comparing ways to exchange gradients" in outcome.err


def test_programs_that_alternate_are_one_mean_step(run: Command) -> None:
    passes = "data-parallel,diloco{every=50 bits=8}"
    found = planned(run, "--network", "1Gbit", "--passes", passes)["step"]
    every = planned(run, "--network", "1Gbit", "--passes", "data-parallel")["step"]
    assert found["kinds"] == 2
    assert found["exchanges"] < 0.05 * every["exchanges"]
    text = run("plan", STEP, *RANKS, "--network", "1Gbit", "--passes", passes).out
    assert "the mean of a long run, in which 2 programs alternate; the highest peak" in text


def test_one_device_has_no_step_of_ranks(run: Command) -> None:
    outcome = run("plan", STEP, "--device", DEVICE, "--json")
    assert "step" not in outcome.data


def test_copies_take_what_their_bytes_do_on_the_way_to_the_host(run: Command) -> None:
    """Both moments of the optimizer, there and back, by hand."""
    found = planned(run, "--passes", "data-parallel,offload-state", of=ROTATED)["step"]
    size = sum(parameter.numel() * 4 for parameter in Rotated().parameters() if parameter.dim() == 2)
    assert found["copies"] == pytest.approx(2 * 2 * size / PROFILES[DEVICE].host_bandwidth, rel=0.01)
    assert found["waited"] > 0


def test_batch_norm_in_mixed_precision_for_a_device_that_is_not_here(run: Command) -> None:
    assert planned(run, "--passes", SHARDED)["step"]["exchanges"] > 0


HYBRID = "data-parallel,shard-parameters{group=host replicas=hosts}"


@pytest.mark.sweep(but=(HYBRID,))
@pytest.mark.parametrize(
    "passes",
    [
        "data-parallel{bucket-mb=auto}",
        "data-parallel,shard-optimizer",
        "data-parallel,shard-parameters{min-bytes=64}",
        "data-parallel,shard-parameters{min-bytes=64},chunk-loss",
        "microbatch{slices=2},data-parallel",
        "data-parallel,compress-gradients",
        "mixed-precision{dtype=float16},data-parallel,shard-parameters",
        HYBRID,
    ],
)
def test_pipelines_that_run_can_be_planned(run: Command, passes: str) -> None:
    found = planned(run, "--passes", passes, of=ROTATED)["step"]
    assert found["exchanges"] > 0
    assert 0 < found["compute"] <= found["seconds"]
