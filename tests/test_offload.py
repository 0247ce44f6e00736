"""Offload: tensors wait on the host or on the disk, come back as they were, and leave the peak that was predicted."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Phase, Pipeline, Policy, Program, measure_peak
from graphopt.errors import PassError
from graphopt.ops import schema, transfer
from graphopt.passes import FitMemory, Offload, Recompute
from graphopt.pipeline import PassRecord
from graphopt.program import info
from graphopt.runtime import transfers
from graphopt.verify import verify
from tests.fitting import applied, attempt, calls, held_bytes, step_peaks, structure
from tests.support import OPTIMIZERS, Net, assert_same_training, captured, identical, mean_square, peaks, results

ROWS = torch.linspace(-1, 1, 256 * 8).reshape(256, 8).cos()
LARGE = 40_000
"""A tensor of 256 rows and 64 features is larger, one of 8 features smaller."""


def off(*tensors: str, **options: Any) -> Offload:
    """The pass with figures from the roofline, for tensors from ``LARGE`` bytes on."""
    return Offload(tensors, **{"cost": "roofline", "min_bytes": LARGE, **options})


def layers(p: float = 0.3) -> Net:
    """Alternates between 8 and 64 features; its large tensors come one after the other."""
    torch.manual_seed(0)
    return Net(
        nn.Linear(8, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(),
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8),
    )  # fmt: skip


def moved(program: Program) -> list[str]:
    """The names of what is offloaded, in the order in which copies start."""
    return [info(node.args[0]).names[0] for node in calls(program, "offload")]  # type: ignore[arg-type]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "transfers" in thread.name]


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> Iterator[None]:
    yield
    gc.collect()  # tracebacks of errors hold the tensors of their frames
    assert held_bytes() == 0
    assert len(threads()) <= 1


# --- bits and bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", ["auto", 0, 1, 3])
@pytest.mark.parametrize("tier", transfers.TIERS)
def test_results_are_the_programs_and_the_peak_is_the_predicted_one(tier: str, prefetch: int | str) -> None:
    model = layers()
    plain = captured(model, ROWS)
    program, record = applied(plain, off(tier=tier, prefetch=prefetch))
    verify(program, before=plain)
    assert record.changed
    assert program.memory().peak_bytes == record.peak_after < plain.memory().peak_bytes
    predicted, measured = peaks(program, model, ROWS)
    assert measured == predicted
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    (expected, state), (found, after) = results(plain, one, ROWS), results(program, other, ROWS)
    assert [spec for spec, value in found.items() if not identical(value, expected[spec])] == []
    assert torch.equal(state, after)


@pytest.mark.parametrize(("tier", "optimizer"), [("host", "adamw"), ("disk", "momentum")])
def test_training_equals_eager(tier: str, optimizer: str) -> None:
    batches = [(ROWS,), (ROWS.sin(),)]
    assert_same_training(layers(), optimizer, mean_square, batches, [off(tier=tier)], steps=3)


def test_training_with_recomputation_and_offloaded_checkpoints_equals_eager() -> None:
    passes = [Recompute(["net.3", "net.5", "net.7"]), off()]
    assert_same_training(layers(), "sgd", mean_square, [(ROWS,)], passes, steps=2)
    program, record = applied(captured(layers(p=0.0), ROWS), *passes)
    assert record.changed, record.changed.reason
    assert set(moved(program)) <= {"net.3", "net.5", "net.7"}


def conv() -> nn.Module:
    torch.manual_seed(0)
    return Net(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 4),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def test_convolutions_whose_channels_are_last_come_back_with_their_strides() -> None:
    images = torch.randn(8, 4, 16, 16).to(memory_format=torch.channels_last)
    passes = [off(min_bytes=1000, keep_last=0)]
    model = Net(*list(conv().net)[:7], nn.Flatten(), nn.Linear(512, 4)).to(memory_format=torch.channels_last)
    program, record = applied(captured(model, images), *passes)
    assert record.changed
    strides = {node.args[2][1] for node in calls(program, "prefetch") if len(node.args[1]) == 4}  # type: ignore[index,arg-type]
    assert 1 in strides
    predicted, measured = peaks(program, model, images)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(images,)], passes, steps=2)


def test_a_whole_step_peaks_as_predicted() -> None:
    plain, _ = step_peaks(layers(), OPTIMIZERS["adamw"], mean_square, (ROWS,), [])
    step, measured = step_peaks(layers(), OPTIMIZERS["adamw"], mean_square, (ROWS,), [off()])
    assert step.records[0].changed
    assert measured == step.program.memory().allocated_peak_bytes < plain.program.memory().allocated_peak_bytes


def test_drop_in_training_peaks_lower() -> None:
    def peak(model: nn.Module) -> int:
        model(ROWS).sum().backward()
        model.zero_grad()
        return measure_peak(lambda: model(ROWS).sum().backward()).allocated_peak_bytes

    assert peak(graphopt.optimize(layers(), [off()])) < peak(graphopt.optimize(layers()))


# --- what is moved ---------------------------------------------------------------------------------------------------


def test_names_globs_and_everything() -> None:
    plain = captured(layers(), ROWS)
    by_name, _ = applied(plain, off("net.4", "net.6", keep_last=0))
    assert moved(by_name) == ["net.4", "net.6"]
    by_glob, _ = applied(plain, off("net.*"))
    assert set(moved(by_glob)) <= {f"net.{number}" for number in range(10)}
    everything, record = applied(plain, off())
    assert set(moved(by_name)) < set(moved(everything))
    assert set(record.changed.tensors) == set(moved(everything))
    assert record.changed.counts == {"offloaded": len(moved(everything))}
    policies = [info(node).policy for node in everything.find(*moved(everything)).values()]
    assert set(policies) == {Policy.MUST_CPU_OFFLOAD}


def test_the_tensors_that_backward_needs_first_stay() -> None:
    plain = captured(layers(), ROWS)
    _, one = applied(plain, off(keep_last=1))
    _, two = applied(plain, off(keep_last=2))
    _, none = applied(plain, off(keep_last=0))
    counts = [record.changed.counts["offloaded"] for record in (none, one, two)]
    assert counts == [counts[0], counts[0] - 1, counts[0] - 2]
    assert "net.8 stays: backward begins with it" in "\n".join(one.changed.lines)
    assert "net.8" in none.changed.tensors
    assert "net.8" not in one.changed.tensors


def test_what_is_moved_is_not_read_by_backward_itself() -> None:
    program, record = applied(captured(layers(), ROWS), off())
    for name in record.changed.tensors:
        readers = {info(user).phase for user in program.find(name)[name].users}
        assert readers <= {Phase.FORWARD, Phase.TRANSFER}


def test_how_far_ahead_copies_back_start() -> None:
    plain = captured(layers(), ROWS)
    together = {}
    for prefetch in (0, 1, 3):
        program, _ = applied(plain, off(prefetch=prefetch))
        level, most = 0, 0
        for node in program.phase_nodes(Phase.TRANSFER):
            level += {"prefetch": 1, "prefetch_wait": -1}.get(schema.op_name(node), 0)
            most = max(most, level)
        together[prefetch] = most
    assert together[0] == 1
    assert together[0] < together[1] < together[3]


def test_whatever_the_link_the_peak_goes_as_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link the computation waits, and in drop-in training no copy away goes on in backward."""
    plain, found = captured(layers(), ROWS), set()
    for rate in (1e3, 1e8, 1e15):
        monkeypatch.setattr(sys.modules[Offload.__module__], "link_bandwidth", lambda device, tier, rate=rate: rate)
        program, _ = applied(plain, off())
        found.add(program.memory().peak_bytes)
        model = graphopt.optimize(layers(), [off()], example_inputs=(ROWS,))
        halves = [model.forward_graph, model.backward_graph]
        waits = [[node for node in half.graph.nodes if node.target is transfer.offload_wait] for half in halves]
        assert [len(nodes) for nodes in waits] == [model.records[0].changed.counts["offloaded"], 0]
    assert len(found) == 1
    assert found.pop() < 0.65 * plain.memory().peak_bytes


def test_the_record_says_where_tensors_wait_and_for_how_long() -> None:
    _, record = applied(captured(layers(), ROWS), off(tier="disk"))
    text = "\n".join(record.changed.lines)
    assert "tensors wait on the disk, over a link of" in text
    for name in record.changed.tensors:
        assert f"  {name}: 65.5 kB, freed" in text


class Views(nn.Module):
    """Backward reads views of one large tensor only: transposed, a slice, expanded, parts of a split, one of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = graphopt.name(self.b(self.a(x).tanh()).sin(), "base")
        left, right = y.split([24, 40], -1)
        gram = y.t() @ y
        spread = y[:32, None, 3:7].expand(32, 5, 4)
        total = left.cos().sum(-1) * right.exp().sum(-1) + gram.sum() + (spread * spread).sum()
        z = torch.tanh(total[:, None] * y[:1, ::9].sigmoid().sum() * self.a(x))
        return self.b(self.b(z).tanh()).sigmoid()


def test_views_are_made_anew_on_what_came_back() -> None:
    model = Views()
    plain = captured(model, ROWS)
    program, record = applied(plain, off("base", keep_last=0))
    verify(program, before=plain)
    assert record.changed, record.changed.reason
    assert moved(program) == ["base"]
    assert Phase.BACKWARD not in {info(node).phase for node in program.find("base")["base"].users}
    predicted, measured = peaks(program, model, ROWS)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(ROWS,)], [off("base", keep_last=0)], steps=2)


class Parts(nn.Module):
    """An op with several large results, of which backward reads some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = self.a(x).sort(-1)
        z = self.b(values.tanh()).sigmoid()
        return (z * values.gather(-1, order)).sin().cos().tanh()


def test_results_of_an_op_with_several_are_moved_one_by_one() -> None:
    model = Parts()
    plain = captured(model, ROWS)
    program, record = applied(plain, off(keep_last=0))
    assert record.changed, record.changed.reason
    predicted, measured = peaks(program, model, ROWS)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(ROWS,)], [off(keep_last=0)], steps=2)


# --- what is declined ------------------------------------------------------------------------------------------------


def declined(plain: Program, options: Offload) -> PassRecord:
    program, record = applied(plain, options)
    assert not record.changed
    assert structure(program) == structure(plain)
    return record


def test_where_it_cannot_lower_the_peak_nothing_is_moved() -> None:
    class Peaked(nn.Module):
        """The peak is inside of backward's first op, where nothing waits."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh()).sum(-1)

    record = declined(captured(Peaked(), ROWS), off("**tanh*", keep_last=0))
    assert "would not lower it" in record.changed.reason
    assert "the peak of" in record.changed.reason


def test_tensors_that_are_too_small_stay() -> None:
    record = declined(captured(layers(), ROWS), off(min_bytes=10**9))
    assert "large enough" in record.changed.reason


def test_applied_twice_it_does_nothing() -> None:
    program, _ = applied(captured(layers(), ROWS), off())
    again, record = applied(program, off(tier="disk"))
    assert "already" in record.changed.reason
    assert structure(again) == structure(program)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.44", "net.4"),
        ("net.3::t_1~", "backward"),
        ("args[0]", "it is an input"),
        ("net.0.weight", "it is an input"),
        ("net.3", "nothing after forward reads it"),
    ],
)
def test_a_name_that_cannot_be_moved(name: str, message: str) -> None:
    plain = captured(layers(), ROWS)
    if name.endswith("~"):
        name = next(info(node).names[0] for node in plain.phase_nodes(Phase.BACKWARD) if info(node).names)
    error = attempt(lambda: applied(plain, off(name)))
    assert isinstance(error, PassError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "dsk"}, "disk"),
        ({"tier": ""}, "host"),
        ({"prefetch": "soon"}, "prefetch is auto or a number"),
        ({"prefetch": -1}, "at least 0"),
        ({"prefetch": True}, "at least 0"),
        ({"keep_last": -1}, "at least 0"),
        ({"min_bytes": -1}, "at least 0"),
        ({"cost": "guess"}, "measured or roofline"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        Offload(**options)


def test_a_name_instead_of_a_tuple_of_names() -> None:
    with pytest.raises(TypeError, match="write"):
        Offload("net.1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "offload",
        "offload{tensors=net.1,net.3}",
        "offload{tier=disk prefetch=2}",
        "offload{tensors=blocks.* min-bytes=0 keep-last=0}",
        "offload{prefetch=0 cost=roofline}",
    ],
)
def test_the_text_form_goes_both_ways(text: str) -> None:
    assert Pipeline(str(Pipeline(text))).passes == Pipeline(text).passes
    assert str(Pipeline(text)) == text


def test_it_follows_a_budget() -> None:
    passes = [off(), FitMemory("80%", cost="roofline")]
    assert [current.name for current in Pipeline(passes).passes] == ["fit-memory", "offload"]


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", transfers.TIERS)
def test_too_little_room_is_an_error_before_the_first_step(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = sys.modules[Offload.__module__]
    monkeypatch.setattr(offload, f"free_{tier}_bytes", lambda: 100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    error = attempt(lambda: applied(captured(layers(), ROWS), off(tier=tier)))
    assert f"on the {tier} for each of 4 processes, and 100000 bytes (100.0 kB) are there" in str(error)


def one_step(model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    mean_square(model, ROWS).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_disk_that_is_full_is_an_error_and_the_next_step_runs(tmp_path: Path) -> None:
    model = graphopt.optimize(layers(), [off(tier="disk")])
    expected = one_step(layers())
    transfers.configure(disk_directory=tmp_path, disk_limit=100_000)
    try:
        error = attempt(lambda: one_step(model))
        assert "100000" in str(error)
        del error
        gc.collect()
        assert held_bytes() == 0
        transfers.configure(disk_directory=tmp_path)
        assert all(identical(a, b) for a, b in zip(one_step(model), expected, strict=True))
        assert list(tmp_path.iterdir()) == []
    finally:
        transfers.configure()


def test_host_memory_that_runs_out_is_an_error_and_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphopt.optimize(layers(), [off()])
    expected = one_step(layers())
    one_step(model)
    engine = transfers.Engine(available=lambda: 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "engine", lambda: engine)
        error = attempt(lambda: one_step(model))
        assert "65536 bytes" in str(error)
        del error
        gc.collect()
        assert engine.statistics().held_bytes == 0
    engine.close()
    assert all(identical(a, b) for a, b in zip(one_step(model), expected, strict=True))


# --- autograd --------------------------------------------------------------------------------------------------------


def two_forwards(model: nn.Module) -> None:
    (mean_square(model, ROWS) * mean_square(model, ROWS.sin())).backward()


def backward_twice(model: nn.Module) -> None:
    loss = mean_square(model, ROWS)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def failing_between(model: nn.Module) -> None:
    def fail(model: nn.Module) -> None:
        loss = mean_square(model, ROWS)
        raise ArithmeticError(str(loss.shape))

    with pytest.raises(ArithmeticError):
        fail(model)
    mean_square(model, ROWS).backward()


def failing_in_backward(model: nn.Module) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("in the middle of backward")

    x = ROWS.clone().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        mean_square(model, x).backward()
    model.zero_grad()
    mean_square(model, ROWS).backward()


def forward_without_backward(model: nn.Module) -> None:
    mean_square(model, ROWS)
    mean_square(model, ROWS).backward()


@pytest.mark.parametrize("tier", transfers.TIERS)
@pytest.mark.parametrize(
    "use", [two_forwards, backward_twice, failing_between, failing_in_backward, forward_without_backward]
)
def test_whatever_the_user_does_with_the_graph(use: Callable[[nn.Module], None], tier: str) -> None:
    found = []
    for model in (layers(), graphopt.optimize(layers(), [off(tier=tier)])):
        torch.manual_seed(1)
        use(model)
        found.append([parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()])
    assert all(identical(one, other) for one, other in zip(*found, strict=True))
    gc.collect()
    assert held_bytes() == 0


def test_a_loss_that_is_kept_holds_what_backward_will_need() -> None:
    model = graphopt.optimize(layers(), [off()])
    loss = mean_square(model, ROWS)
    assert held_bytes() == 65536 * len(model.records[0].changed.tensors)
    loss.backward()
    del loss
    assert held_bytes() == 0


def test_a_failure_within_the_step_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), [off()], loss=mean_square)
    step(ROWS)
    engine = transfers.engine()
    original, times = engine.prefetch, []

    def fail(*args: Any) -> torch.Tensor:
        times.append(1)
        if len(times) == 2:
            raise GraphoptError("a test")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "prefetch", fail)
        assert "a test" in str(attempt(lambda: step(ROWS)))
    gc.collect()
    assert held_bytes() == 0
    step(ROWS)


# --- a process with too little memory --------------------------------------------------------------------------------

LIMITED = """
import resource, sys
import torch
from torch import nn
import graphopt
from graphopt.passes import Offload

torch.set_num_threads(1)
torch.manual_seed(0)
tier, limit = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(12)))
x = torch.randn(8192, 16)  # 12 tensors of 8.4 MB that backward needs
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
passes = [Offload(tier=tier, cost="roofline", prefetch=1)] if tier != "keep" else []

def loss(model, x):
    return (model(x) - x).square().mean()

step = graphopt.optimize_step(model, optimizer, passes, loss=loss)
step(x[:512])  # starts threads; captures another shape
step.prepare(x)
torch.ones(1 << 20).sum()

def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))

if limit:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, before[1]))
try:
    for _ in range(2):
        value = step(x)
    print(value.item().hex(), sum(p.double().sum() for p in model.parameters()).item().hex())
except (RuntimeError, graphopt.GraphoptError) as error:
    print("no memory" if "memory" in str(error) else error)
"""


def limited(tier: str, limit: int, folder: Path) -> str:
    """What a process says that trains with ``limit`` more bytes than it has when it is ready; 0 for any number."""
    environment = {
        **os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "GRAPHOPT_DISK": str(folder), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIMITED, tier, str(limit)], cwd=Path(__file__).parents[1],
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_process_whose_activations_exceed_its_memory_trains_with_the_disk(tmp_path: Path) -> None:
    room = 80_000_000
    free, on_disk = limited("keep", 0, tmp_path), limited("disk", room, tmp_path)
    assert on_disk == free != ""
    assert limited("keep", room, tmp_path) == "no memory"
    assert list(tmp_path.iterdir()) == []


def test_the_ops_are_those_of_the_transfers() -> None:
    program, record = applied(captured(layers(), ROWS), off())
    count = record.changed.counts["offloaded"]
    for op in (transfer.offload, transfer.offload_wait, transfer.prefetch, transfer.prefetch_wait):
        assert len([node for node in program.nodes if node.target is op]) == count
