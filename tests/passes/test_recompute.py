"""Recompute: which names it takes, what it keeps, and that results equal eager's to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import PassError, Phase, Pipeline, Policy
from graphopt.ir.node import info, value_of
from graphopt.passes import Recompute
from tests.support.covering import covering
from tests.support.training import (
    Blocks,
    Net,
    assert_same_training,
    captured,
    mean_square,
    next_token,
    ops,
    peaks,
    rewritten,
    saved,
)

TOKENS = torch.arange(12).reshape(2, 6) % 11
WIDE = torch.linspace(-1, 1, 512 * 16).reshape(512, 16)


def wide_net(depth: int = 4, p: float = 0.0) -> Net:
    """Layers whose activations (512 × 16) dwarf their parameters and the generator's state."""
    return Net(*(m for _ in range(depth) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(p))))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("blocks.*.mlp-expected2",))
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("blocks.?", ["blocks.0", "blocks.1"]),
        ("blocks.*.mlp", ["blocks.0.mlp", "blocks.1.mlp"]),
        ("blocks.*.mlp.3", ["blocks.0.mlp.3", "blocks.1.mlp.3"]),
        ("blocks.*::add", ["blocks.0::add", "blocks.1::add"]),
        ("blocks.1", ["blocks.1"]),
    ],
)
def test_a_star_is_one_level(pattern: str, expected: list[str]) -> None:
    program = captured(Blocks(2), TOKENS, loss=next_token)
    assert sorted(program.find(pattern)) == expected


@pytest.mark.sweep
def test_two_stars_are_any_text() -> None:
    program = captured(Blocks(2), TOKENS, loss=next_token)
    everything = program.names()
    assert set(program.find("blocks.1**")) == {name for name in everything if name.startswith("blocks.1")}
    assert set(program.find("**::add*")) == {
        n for n in everything if n.rpartition("::")[2].startswith("add") and "::" in n and "~" not in n
    }
    assert set(program.find("**")) == set(everything)


@pytest.mark.sweep
def test_globs_and_names_choose_the_same_checkpoints() -> None:
    model = Blocks(3)
    by_glob = rewritten(model, TOKENS, passes=[Recompute("blocks.*")], loss=next_token)
    by_name = rewritten(model, TOKENS, passes=[Recompute(["blocks.2", "blocks.0", "blocks.1"])], loss=next_token)
    assert [n.name for n in by_glob.nodes] == [n.name for n in by_name.nodes]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = graphopt.name(self.a(x).tanh(), "res2a")
        x = graphopt.name(self.b(x).tanh(), "res2b")
        return graphopt.name(x * 2, "res2a")


def test_a_given_name_is_the_identity_and_finds_its_tensor() -> None:
    x = torch.randn(3)
    assert graphopt.name(x, "anything") is x
    program = captured(Named(), torch.randn(4, 8))
    found = program.find("res2a", "res2b", "res2a@1")
    assert [str(node.target) for node in found.values()] == [
        "aten.tanh.default",
        "aten.tanh.default",
        "aten.mul.Tensor",
    ]
    Pipeline([Recompute("res2a")]).run(program)
    assert "a::tanh" not in ops(program, Phase.RECOMPUTE)
    assert info(found["res2a"]).policy is Policy.MUST_SAVE


class Parts(nn.Module):
    """Names elements of ops with several results, and modules that return several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.rnn = nn.Linear(8, 24), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        largest, _ = torch.topk(graphopt.name(q, "q") * k.sin(), 8)
        out, _ = self.rnn(graphopt.name(largest, "largest") + v)
        return out.tanh()


@pytest.mark.sweep
def test_parts_of_results_have_names() -> None:
    program = captured(Parts(), torch.randn(2, 3, 8))
    shapes = {name: tuple(value_of(node).shape) for name, node in program.find("q", "largest", "rnn[0]").items()}
    assert shapes == dict.fromkeys(("q", "largest", "rnn[0]"), (2, 3, 8))
    Pipeline([Recompute(["largest", "rnn[0]"])]).run(program)
    assert "topk" not in ops(program, Phase.RECOMPUTE)
    assert "sin" in ops(program, Phase.RECOMPUTE)


@pytest.mark.parametrize("bad", ["", "a*", "what?"])
def test_a_given_name_has_no_glob_characters(bad: str) -> None:
    with pytest.raises(graphopt.GraphoptError, match="cannot name a tensor"):
        graphopt.name(torch.ones(1), bad)


@pytest.mark.sweep(but=("loss~-computed in backward", "net.00-did you mean 'net.0"))
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("net.0::mm~", "computed in backward"),
        ("loss~", "computed in backward"),
        ("net.00", "did you mean 'net.0"),
        ("layers.*", "names no tensor"),
    ],
)
def test_a_name_that_cannot_be_a_checkpoint_says_why(name: str, reason: str) -> None:
    program = captured(Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8).requires_grad_())
    before = [node.name for node in program.nodes]
    with pytest.raises(PassError, match="recompute") as caught:
        Pipeline([Recompute(["net.1", name])]).run(program)
    assert reason in str(caught.value)
    assert repr(name) in str(caught.value)
    assert [node.name for node in program.nodes] == before


def test_a_tangent_cannot_be_a_checkpoint() -> None:
    program = graphopt.capture(Net(nn.Linear(8, 8)), (torch.randn(4, 8),))
    with pytest.raises(PassError, match=r"'tangent\[0\]' cannot be a checkpoint: it is"):
        Pipeline([Recompute("tangent[0]")]).run(program)


def test_all_unknown_names_are_reported_at_once() -> None:
    program = captured(Net(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    with pytest.raises(PassError) as caught:
        Pipeline([Recompute(["net.7", "net.1", "nett.0"])]).run(program)
    assert "'net.7'" in str(caught.value)
    assert "'nett.0'" in str(caught.value)


def test_checkpoints_are_text() -> None:
    with pytest.raises(TypeError, match="Recompute: checkpoints is text or a tuple"):
        Recompute([3])  # type: ignore[list-item]
    assert Recompute("a") == Recompute(["a"]) == Recompute(("a",))


# --- what is kept ----------------------------------------------------------------------------------------------------


class Skip(nn.Module):
    """The result of ``a`` skips over the checkpoint ``b`` and is read again by the last line."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = graphopt.name(self.a(x).sigmoid(), "early")
        return self.c(self.b(early).tanh()).tanh() * early


def test_what_crosses_a_border_is_kept_and_listed_with_its_bytes() -> None:
    program = captured(Skip(), WIDE)
    (record,) = Pipeline([Recompute(["b", "c"])]).run(program)
    (head, row) = record.changed.lines
    assert head.startswith("kept, since they cross a segment's border: 1 tensor (32.8 kB); ")
    assert row.split(":")[0].strip() == "early"
    assert "32.8 kB" in row
    assert "test_recompute.py" in row
    assert ops(program, Phase.RECOMPUTE).count("sigmoid") == 0
    assert "early" in saved(program)


class CrossingView(nn.Module):
    """One half of a split tensor is read behind the checkpoint: the whole storage stays."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x).sigmoid().chunk(2, -1)
        return self.b(left.tanh()).tanh() * right


def test_a_view_that_crosses_keeps_its_storage_and_is_listed_with_all_of_it() -> None:
    model = CrossingView()
    program = captured(model, WIDE)
    plain = program.memory().peak_bytes
    (record,) = Pipeline([Recompute("b")]).run(program)
    assert "65.5 kB" in record.changed.lines[0]
    assert "sigmoid" not in ops(program, Phase.RECOMPUTE)
    assert program.memory().peak_bytes <= plain
    assert_same_training(model, "sgd", mean_square, [(WIDE,)], [Recompute("b")], steps=2)


@pytest.mark.sweep
def test_nothing_crosses_where_the_network_is_a_chain() -> None:
    (record,) = Pipeline([Recompute("net.*")]).run(captured(wide_net(), WIDE))
    assert record.changed.lines == ()


def test_marks_say_what_was_decided() -> None:
    program = rewritten(wide_net(), WIDE, passes=[Recompute(["net.2", "net.5"])])
    kept = {name for node in program.nodes if node.op != "output" and info(node).policy is Policy.MUST_SAVE
            for name in info(node).names}  # fmt: skip
    assert {"net.2", "net.5"} <= kept
    clones = list(program.phase_nodes(Phase.RECOMPUTE))
    assert clones
    assert {info(node).origin for node in clones} <= {"recompute: start .. net.2", "recompute: net.2 .. net.5"}
    assert all(name.endswith("'") for node in clones for name in info(node).names)


@pytest.mark.sweep
def test_applying_it_twice_does_nothing_the_second_time() -> None:
    program = rewritten(Blocks(2, p=0.5), TOKENS, passes=[Recompute("blocks.*")], loss=next_token)
    before = [(n.name, str(n.args)) for n in program.nodes]
    (record,) = Pipeline([Recompute("blocks.*")]).run(program)
    assert not record.changed
    assert record.changed.reason
    assert [(n.name, str(n.args)) for n in program.nodes] == before


@pytest.mark.sweep
def test_auto_applied_twice_does_nothing_the_second_time() -> None:
    model = Net(*(m for _ in range(9) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3))))
    program = rewritten(model, WIDE, passes=[Recompute("auto")])
    before = [(n.name, str(n.args)) for n in program.nodes]
    (record,) = Pipeline([Recompute("auto")]).run(program)
    assert not record.changed
    assert [(n.name, str(n.args)) for n in program.nodes] == before


class OnlyViews(nn.Module):
    """Between its two layers there are views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).view(-1, 3).t().t())  # type: ignore[no-any-return]


def test_views_alone_are_nothing_to_recompute() -> None:
    program = captured(OnlyViews(), torch.randn(5, 4), loss=mean_square)

    def state() -> list[object]:
        calls = [node for node in program.nodes if node.op != "output"]
        return [program.nodes[-1].args, *((node.name, str(node.args)) for node in calls)]

    before = state()
    (record,) = Pipeline([Recompute(("first", "second"))]).run(program)
    assert not record.changed
    assert "backward reads nothing between these checkpoints" in record.changed.reason
    assert state() == before


def test_in_a_part_without_its_checkpoints_it_says_so() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(nn.Linear(4, 4), nn.Tanh()), Net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second(y) if y.sum() < 1e9 else y

    model = graphopt.optimize(Branching(), Recompute("second.net.1"))
    model(torch.randn(8, 4)).sum().backward()
    reasons = [record.changed.reason for record in model.records if record.name == "recompute"]  # type: ignore[attr-defined]
    assert any("none of the checkpoints is in this part of the model" in reason for reason in reasons)
    assert not any("no checkpoints are given" in reason for reason in reasons)


def test_auto_says_when_nothing_separates_the_network() -> None:
    program = captured(Net(nn.Linear(4, 4)), torch.randn(2, 4), loss=lambda model, x: model(x).sum())
    (record,) = Pipeline([Recompute("auto")]).run(program)
    assert not record.changed
    assert "auto" in record.changed.reason


def test_no_checkpoints_is_a_pass_that_says_it_did_nothing() -> None:
    (record,) = Pipeline([Recompute(())]).run(captured(wide_net(), WIDE))
    assert not record.changed
    assert "nothing" in str(record)
    assert "no checkpoints" in str(record)


@pytest.mark.sweep
def test_auto_takes_about_the_square_root_of_the_separating_tensors() -> None:
    model = wide_net(9)
    program = captured(model, WIDE)
    candidates = {c.name for c in program.checkpoint_candidates()}
    plain = program.memory().peak_bytes
    (record,) = Pipeline([Recompute("auto")]).run(program)
    assert set(record.changed.tensors) <= candidates
    assert 3 <= len(record.changed.tensors) <= len(candidates) // 2
    assert program.memory().peak_bytes < 0.75 * plain
    assert_same_training(model, "sgd", mean_square, [(WIDE,)], [Recompute("auto")], steps=2)


def test_candidates_are_the_tensors_that_separate_the_network() -> None:
    candidates = {c.name: c for c in captured(Skip(), WIDE).checkpoint_candidates()}
    assert "early" in candidates
    assert "b" not in candidates
    assert "c" not in candidates
    assert candidates["early"].bytes == 512 * 16 * 4


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("auto-0.0",))
@covering(checkpoints=["net.2", "net.2,net.5", "net.*", "auto", "args[0]", "net.11"], p=[0.2, 0.0])
def test_the_peak_is_predicted_and_never_above_plain(checkpoints: str, p: float) -> None:
    model = wide_net(4, p)
    program = captured(model, WIDE)
    plain, _ = peaks(program, model, WIDE)
    (record,) = Pipeline([Recompute(checkpoints.split(","))]).run(program)
    predicted, measured = peaks(program, model, WIDE)
    assert measured == pytest.approx(predicted, rel=1e-3)
    states = 5056 * record.changed.counts.get("random ops replayed", 0)
    assert predicted <= plain + states


def test_checkpoints_lower_the_measured_peak_of_drop_in_training() -> None:
    model = wide_net(8)

    def peak(candidate: nn.Module) -> int:
        candidate(WIDE).square().mean().backward()
        candidate.zero_grad()
        return graphopt.measure_peak(lambda: candidate(WIDE).square().mean().backward()).allocated_peak_bytes

    plain = peak(copy.deepcopy(model))
    assert peak(graphopt.optimize(copy.deepcopy(model))) <= plain
    assert peak(graphopt.optimize(copy.deepcopy(model), [Recompute(["net.5", "net.11", "net.17"])])) < 0.6 * plain
