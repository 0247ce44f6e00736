"""The ops of sparse exchange: nothing is lost, all ranks get the same sums, and the published invariants hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt import GraphoptError
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication import residual
from graphopt.ir.ops.communication.residual import accumulate_, clear_at_, keep_rest_
from graphopt.ir.ops.communication.selection import select
from graphopt.ir.ops.communication.sparse import pack, packed_bytes, sum_entries, sum_sparse, to_wire, unpack
from tests.support.covering import covering

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIRES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RANKS = 4


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- accumulating ----------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as made": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "channels last": lambda x: x.unsqueeze(0).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "part of another": lambda x: x[1:],
    "a number": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}


def memory_order(x: torch.Tensor) -> list[int]:
    """Positions of the elements of ``x`` in the order of its shape, sorted by where they lie in memory."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size()).as_strided(x.shape, x.stride())
    flat = places.reshape(-1).tolist()
    dense = len(set(flat)) == len(flat) and (not flat or max(flat) - min(flat) == len(flat) - 1)
    return sorted(range(len(flat)), key=flat.__getitem__) if dense else list(range(len(flat)))


@pytest.fixture(params=["in one piece", "in pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in pieces":
        monkeypatch.setattr(residual, "_PIECE", {"cpu": 7, "cuda": 7})


def by_formula(
    g: torch.Tensor, u: torch.Tensor | None, v: torch.Tensor, momentum: float, nesterov: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    if u is None:
        return None, v + g
    if nesterov:
        u = (u + g) * momentum
        return u, v + u + g
    u = u * momentum + g
    return u, v + u


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("device", DEVICES)
@covering(form=["momentum", "nesterov", "feedback"], layout=list(LAYOUTS), dtype=WIRES)
def test_accumulating_is_the_published_formula(form: str, layout: str, dtype: torch.dtype, device: str) -> None:
    gradient = LAYOUTS[layout](torch.randn(3, 4, 6, dtype=dtype, device=device))
    order = memory_order(gradient)
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    u = None if form == "feedback" else torch.randn(gradient.numel(), dtype=kept, device=device)
    v = torch.randn(gradient.numel(), dtype=kept, device=device)
    flat = gradient.reshape(-1)[order].to(kept)
    expected_u, expected_v = by_formula(flat, u, v, 0.9, form == "nesterov")
    accumulate_(gradient, u, v, 0.9, form == "nesterov")
    torch.testing.assert_close(v, expected_v, rtol=1e-6, atol=1e-6)
    if u is not None:
        torch.testing.assert_close(u, expected_u, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_scale_and_weight_decay_act_on_the_gradient(layout: str, device: str) -> None:
    gradient = LAYOUTS[layout](torch.randn(3, 4, 6, dtype=torch.float64, device=device))
    same, other = torch.empty_strided(gradient.shape, gradient.stride(), dtype=torch.float64, device=device), gradient
    same.copy_(torch.randn(gradient.shape, dtype=torch.float64, device=device))
    other = same.clone(memory_format=torch.contiguous_format)  # the same numbers in another order of memory
    flat = (0.25 * gradient + 0.1 * same).reshape(-1)[memory_order(gradient)]
    for parameter in (same, other):
        u, v = (torch.ones(gradient.numel(), dtype=torch.float64, device=device) for _ in range(2))
        scale = torch.tensor([0.25], device=device)
        accumulate_(gradient, u, v, 0.5, False, scale, None, parameter, 0.1)
        torch.testing.assert_close(u, 0.5 + flat, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(v, 1.5 + flat, rtol=1e-14, atol=1e-14)


def test_accumulating_leaves_gradient_and_parameter_alone() -> None:
    gradient, parameter = torch.randn(5, 4), torch.randn(5, 4)
    before = gradient.clone(), parameter.clone()
    accumulate_(gradient, torch.zeros(20), torch.zeros(20), 0.9, True, torch.tensor(2.0), None, parameter, 0.1)
    assert torch.equal(gradient, before[0])
    assert torch.equal(parameter, before[1])


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("form", ["momentum", "nesterov", "feedback"])
def test_what_is_not_finite_never_enters(form: str, on_host: bool) -> None:
    how = accumulate_ if on_host else residual._accumulate_unread  # the latter is what CUDA runs
    bad = torch.randn(40)
    bad[::3], bad[1::3], bad[2] = math.inf, math.nan, -math.inf
    u = None if form == "feedback" else torch.randn(40)
    v = torch.randn(40)
    v[:2] = torch.tensor([0.0, -0.0])
    before = [None if x is None else x.clone() for x in (u, v)]
    how(bad, u, v, 0.9, form == "nesterov", torch.tensor(math.nan), torch.zeros(1), torch.full((40,), math.inf), 0.1)
    for now, old in zip((u, v), before, strict=True):
        assert now is old is None or same_bits(now, old)  # type: ignore[arg-type]


@pytest.mark.parametrize("on_host", [True, False])
def test_keeping_a_finite_gradient_changes_nothing(on_host: bool) -> None:
    how = accumulate_ if on_host else residual._accumulate_unread
    gradient, u, v = torch.randn(40), torch.randn(40), torch.randn(40)
    plain_u, plain_v = u.clone(), v.clone()
    accumulate_(gradient, plain_u, plain_v, 0.9, True)
    how(gradient, u, v, 0.9, True, None, torch.ones(()))
    assert torch.equal(u, plain_u)
    assert torch.equal(v, plain_v)


WRONG_ACCUMULATES: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (
        lambda: accumulate_(torch.zeros(3, dtype=torch.int32), None, torch.zeros(3), 0.9, False),
        r"accumulate_: the gradient must be real floating-point, not torch\.int32",
    ),
    "size": (
        lambda: accumulate_(torch.zeros(3), None, torch.zeros(4), 0.9, False),
        r"3 elements and torch\.float32, v must be flat.* not torch\.float32 of shape \[4\]",
    ),
    "dtype": (
        lambda: accumulate_(torch.zeros(3).double(), torch.zeros(3), torch.zeros(3).double(), 0.9, False),
        r"u must be flat, of as many elements and torch\.float64, not torch\.float32",
    ),
    "not flat": (
        lambda: accumulate_(torch.zeros(2, 2), None, torch.zeros(2, 2), 0.9, False),
        r"v must be flat.* not torch\.float32 of shape \[2, 2\]",
    ),
    "scale": (
        lambda: accumulate_(torch.zeros(3), None, torch.zeros(3), 0.9, False, torch.ones(3)),
        r"scale must be one element, not torch\.float32 of shape \[3\]",
    ),
    "keep": (
        lambda: accumulate_(torch.zeros(3), None, torch.zeros(3), 0.9, False, None, torch.ones(2)),
        "keep must be one element",
    ),
    "parameter": (
        lambda: accumulate_(torch.zeros(3), None, torch.zeros(3), 0.9, False, None, None, torch.ones(2), 0.1),
        r"the parameter must have the gradient's shape \[3\]",
    ),
}


@pytest.mark.parametrize("name", list(WRONG_ACCUMULATES))
def test_wrong_accumulates_say_why(name: str) -> None:
    call, message = WRONG_ACCUMULATES[name]
    with pytest.raises(GraphoptError, match=message):
        call()


# --- the published invariants ----------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """Ranks in one process that train ``x`` by sparse exchange; counts what was added to and sent from residuals."""

    x: torch.Tensor
    k: int
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    feedback: bool = False
    wire: torch.dtype = torch.float64
    us: list[torch.Tensor] = field(init=False)
    vs: list[torch.Tensor] = field(init=False)
    added: list[torch.Tensor] = field(init=False)
    sent: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("us", "vs", "added", "sent"):
            setattr(self, name, [torch.zeros_like(self.x) for _ in range(RANKS)])

    def step(self, gradients: Sequence[torch.Tensor], lr: float) -> None:
        packed = []
        for rank, gradient in enumerate(gradients):
            u, v = None if self.feedback else self.us[rank], self.vs[rank]
            before = v.clone()
            accumulate_(gradient, u, v, self.momentum, self.nesterov)
            self.added[rank] += v - before
            indices, values = select(v, self.k)
            rounded = to_wire(values, self.wire)
            keep_rest_(v, indices, rounded)
            if self.masking and u is not None:
                clear_at_(u, indices)
            self.sent[rank].index_add_(0, indices, rounded.double())
            packed.append(pack([indices], [rounded], self.wire))
        size, gathered = self.x.numel(), torch.cat(packed)
        (mean,) = sum_sparse(gathered, RANKS, [self.k], [size], self.wire, torch.float64, 1 / RANKS)
        self.x -= lr * mean


def quadratics(size: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The gradients of a quadratic function for each rank."""
    made = []
    for _ in range(RANKS):
        factor, target = torch.randn(size, size, dtype=torch.float64) / size, torch.randn(size, dtype=torch.float64)
        made.append(lambda x, a=factor, b=target: a.T @ (a @ x - b))
    return made


def train(simulation: Simulation, steps: int = 30, lr: float = 0.1) -> torch.Tensor:
    ranks = quadratics(simulation.x.numel())
    for _ in range(steps):
        simulation.step([gradient(simulation.x) for gradient in ranks], lr)
    return simulation.x


def train_densely(x: torch.Tensor, steps: int = 30, lr: float = 0.1, **options: Any) -> torch.Tensor:
    """torch's own SGD on the mean gradient."""
    x = x.clone()
    optimizer = torch.optim.SGD([x], lr=lr, **options)
    ranks = quadratics(x.numel())
    for _ in range(steps):
        x.grad = torch.stack([gradient(x) for gradient in ranks]).mean(0)
        optimizer.step()
    return x


@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ({"masking": False}, {"momentum": 0.9}),
        ({"masking": False, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
        ({"masking": True}, {}),
        ({"feedback": True}, {}),
    ],
    ids=["momentum", "nesterov", "masking gives plain SGD", "feedback gives plain SGD"],
)
def test_density_one_is_dense_training(options: dict[str, Any], dense: dict[str, Any]) -> None:
    start = torch.randn(60, dtype=torch.float64)
    torch.manual_seed(1)
    expected = train_densely(start, **dense)
    torch.manual_seed(1)
    found = train(Simulation(start.clone(), k=60, **options))
    assert (found - expected).abs().max() < 1e-12
    assert (expected - start).abs().max() > 0.1


@covering(nesterov=[False, True], k=[1, 6, 30], wire=WIRES)
def test_what_is_added_is_sent_or_kept(nesterov: bool, k: int, wire: torch.dtype) -> None:
    simulation = Simulation(torch.randn(60, dtype=torch.float64), k=k, nesterov=nesterov, wire=wire)
    train(simulation)
    for added, sent, kept in zip(simulation.added, simulation.sent, simulation.vs, strict=True):
        assert (added - sent - kept).abs().max() < 1e-12
        assert sent.abs().max() > 0


# --- packing and adding up -------------------------------------------------------------------------------------------


def entries(size: int, count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Distinct indices in ascending order, and values for them."""
    indices = torch.randperm(size)[:count].sort().values.int()
    return indices.to(device), torch.randn(count, dtype=dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@covering(counts=[[1], [3], [5, 1], [2, 0, 7], [0]], wire=WIRES)
def test_packing_holds_indices_then_values(counts: list[int], wire: torch.dtype, device: str) -> None:
    given_entries = [entries(20, count, device) for count in counts]
    packed = pack([indices for indices, _ in given_entries], [values for _, values in given_entries], wire)
    assert packed.dtype is torch.uint8
    assert packed.numel() == packed_bytes(counts, wire)
    places, numbers = unpack(packed, counts, wire)
    for (indices, values), found, sent in zip(given_entries, places, numbers, strict=True):
        assert torch.equal(found, indices)
        assert same_bits(sent, values.to(wire))
    assert packed[: 4 * sum(counts)].tolist() == torch.cat(places).view(torch.uint8).tolist()


def test_packed_bytes_are_those_of_indices_and_values_with_little_between() -> None:
    assert packed_bytes([25_557]) == 8 * 25_557
    assert packed_bytes([3, 1], torch.bfloat16) == 6 * 4
    assert (
        packed_bytes([3], torch.float16) == 4 * 3 + 2 * 3 + 2
    )  # so that the next rank's indices lie at a multiple of 4
    assert packed_bytes([3], torch.float64) == 4 * 3 + 4 + 8 * 3
    assert packed_bytes([]) == 0


def test_gaps_are_filled_with_zeros() -> None:
    indices, values = torch.tensor([1, 5, -1], dtype=torch.int32), torch.full((3,), -1.0)
    assert pack([indices], [values], torch.float16)[-2:].tolist() == [0, 0]
    assert pack([indices], [values], torch.float64)[12:16].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_what_the_wire_cannot_hold_stays_finite_and_in_the_residual(wire: torch.dtype) -> None:
    v = torch.tensor([3.4e38, -3.4e38, 1.0009765, 0.0])
    indices, values = select(v, 3)
    sent = to_wire(values, wire)
    assert sent.isfinite().all()
    assert sent[0] == torch.finfo(wire).max
    before = v.clone()
    keep_rest_(v, indices, sent)
    assert torch.equal(v[:3], before[:3] - sent.float())
    assert v[2] != 0


def test_nothing_is_rounded_in_the_dtype_of_the_residual() -> None:
    v = torch.randn(100)
    indices, values = select(v, 10)
    sent = to_wire(values, torch.float32)
    assert sent.data_ptr() != values.data_ptr()
    keep_rest_(v, indices, sent)
    assert torch.equal(v[indices.long()], torch.zeros(10))


def test_clearing_writes_zeros_at_indices_only() -> None:
    x = torch.arange(1.0, 7.0)
    clear_at_(x, torch.tensor([0, 4], dtype=torch.int32))
    assert x.tolist() == [0, 2, 3, 4, 0, 6]


WIRES_AND_SUMS = [
    pytest.param(wire, out, id=f"{wire}-{out}", marks=() if out in (wire, torch.float32) else pytest.mark.sweep)
    for wire in WIRES
    for out in WIRES
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("density", [0.01, 0.5], ids=["few", "many"])
@pytest.mark.parametrize(("wire", "out"), WIRES_AND_SUMS)
def test_sums_are_those_in_the_order_of_the_ranks(
    density: float, wire: torch.dtype, out: torch.dtype, device: str
) -> None:
    sizes = [1000, 300]
    counts = [int(size * density) for size in sizes]
    ranks = [[entries(size, count, device) for size, count in zip(sizes, counts, strict=True)] for _ in range(RANKS)]
    packs = [pack([indices for indices, _ in rank], [values for _, values in rank], wire) for rank in ranks]
    sums = sum_sparse(torch.cat(packs), RANKS, counts, sizes, wire, out, 1 / 3)
    exact = torch.float64 if out is torch.float64 else torch.float32
    for number, (size, found) in enumerate(zip(sizes, sums, strict=True)):
        expected = torch.zeros(size, dtype=exact, device=device)
        for rank in ranks:
            indices, values = rank[number]
            expected[indices.long()] += values.to(wire).to(exact) * (1 / 3)
        assert same_bits(found, expected.to(out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("wire", "out"), WIRES_AND_SUMS)
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [([1000, 300, 7], [9, 200, 1]), ([50], [50]), ([4, 9, 6], [2, 0, 6])], ids=str,
)  # fmt: skip
def test_sums_of_entries_are_those_of_dense_sums(
    sizes: list[int], counts: list[int], wire: torch.dtype, out: torch.dtype, device: str
) -> None:
    """To the last bit, tensor after tensor and rank after rank; an element that several ranks sent has all of it."""
    ranks = [[entries(size, count, device) for size, count in zip(sizes, counts, strict=True)] for _ in range(RANKS)]
    packs = [pack([i for i, _ in rank], [v for _, v in rank], wire) for rank in ranks]
    gathered = torch.cat(packs)
    indices, sums = sum_entries(gathered, RANKS, counts, sizes, wire, out, 1 / 3)
    dense = sum_sparse(gathered, RANKS, counts, sizes, wire, out, 1 / 3)
    assert indices.dtype is torch.int64
    each = [RANKS * count for count in counts]
    for number, (places, found) in enumerate(zip(indices.split(each), sums.split(each), strict=True)):
        assert places.tolist() == [index for rank in ranks for index in rank[number][0].tolist()]
        assert same_bits(found, dense[number][places])
        assert not dense[number].index_fill(0, places, 0).any()


def test_sums_of_entries_are_made_without_dense_tensors() -> None:
    """Of a tensor of 2**31 - 1 elements: 8 GB as dense sums."""
    size = 2**31 - 1
    indices = torch.tensor([0, 5, size - 1], dtype=torch.int32)
    packs = [pack([indices], [torch.full((3,), float(rank))], torch.float32) for rank in range(1, 3)]
    found, sums = sum_entries(torch.cat(packs), 2, [3], [size], torch.float32, torch.float32, 1.0)
    assert found.tolist() == [0, 5, size - 1] * 2
    assert sums.tolist() == [3.0] * 6


def test_every_rank_gets_the_same_bits() -> None:
    """The order of the ranks decides, not who computes: another order gives other bits."""
    size, count = 200, 150
    packs = []
    for rank in range(RANKS):
        indices, values = entries(size, count)
        packs.append(pack([indices], [values * 10.0**rank], torch.float32))
    arguments = (RANKS, [count], [size], torch.float32, torch.float32, 1 / RANKS)
    first, *others = [sum_sparse(torch.cat(packs), *arguments)[0] for _ in range(RANKS)]
    assert all(same_bits(first, other) for other in others)
    turned = sum_sparse(torch.cat(packs[1:] + packs[:1]), *arguments)[0]
    assert not torch.equal(first, turned)
    torch.testing.assert_close(first, turned)


def test_a_scale_of_one_leaves_the_sum() -> None:
    indices, values = entries(50, 5)
    (found,) = sum_sparse(pack([indices], [values], torch.float32), 1, [5], [50], torch.float32, torch.float32, 1.0)
    assert torch.equal(found[indices.long()], values)
    assert found.count_nonzero() == 5


INDICES = torch.tensor([0, 1], dtype=torch.int32)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "clear with int64": (
        lambda: clear_at_(torch.zeros(3), INDICES.long()),
        r"clear_at_: indices must be flat and torch\.int32, not torch\.int64 of shape \[2\]",
    ),
    "clear in a matrix": (
        lambda: clear_at_(torch.zeros(3, 3), INDICES),
        r"clear_at_: the tensor to write to must be flat, not torch\.float32 of shape \[3, 3\]",
    ),
    "keep rest of another number": (
        lambda: keep_rest_(torch.zeros(3), INDICES, torch.zeros(3)),
        "keep_rest_: for 2 indices, what was sent must be as many numbers",
    ),
    "wire": (lambda: to_wire(torch.zeros(3), torch.int8), r"values travel in torch\.float32, .* not in torch\.int8"),
    "pack on a strange wire": (lambda: pack([INDICES], [torch.zeros(2)], torch.int32), "pack: values travel in"),
    "pack values alone": (lambda: pack([], [torch.zeros(2)], torch.float32), "of one tensor or more, not 0 and 1"),
    "pack int64": (
        lambda: pack([INDICES, INDICES.long()], [torch.zeros(2)] * 2, torch.float32),
        r"pack: indices\[1\] must be flat and torch\.int32, and values\[1\] of the same shape, not torch\.int64",
    ),
    "pack values of another number": (
        lambda: pack([INDICES], [torch.zeros(3)], torch.float32),
        r"not torch\.int32 of shape \[2\] and torch\.float32 of shape \[3\]",
    ),
    "sum of other bytes": (
        lambda: sum_sparse(torch.zeros(15, dtype=torch.uint8), 2, [1], [9], torch.float32, torch.float32, 0.5),
        r"2 ranks that pack 1 entries .* give torch\.uint8 of shape \[16\], not torch\.uint8 of shape \[15\]",
    ),
    "sum of entries of other bytes": (
        lambda: sum_entries(torch.zeros(15, dtype=torch.uint8), 2, [1], [9], torch.float32, torch.float32, 0.5),
        r"sum_entries: 2 ranks that pack 1 entries .* give torch\.uint8 of shape \[16\], not torch\.uint8 of shape",
    ),
    "sum of other counts": (
        lambda: sum_sparse(torch.zeros(16, dtype=torch.uint8), 2, [1], [9, 9], torch.float32, torch.float32, 0.5),
        "1 counts are given for 2 tensors",
    ),
    "sum into integers": (
        lambda: sum_sparse(torch.zeros(16, dtype=torch.uint8), 2, [1], [9], torch.float32, torch.int64, 0.5),
        r"the sums must be real floating-point, not torch\.int64",
    ),
    "more entries than elements": (
        lambda: sum_sparse(torch.zeros(32, dtype=torch.uint8), 2, [2], [1], torch.float32, torch.float32, 0.5),
        r"counts\[0\] is 2 and sizes\[0\] is 1",
    ),
    "more elements than int32 counts": (
        lambda: sum_sparse(torch.zeros(16, dtype=torch.uint8), 2, [1], [2**31], torch.float32, torch.float32, 0.5),
        r"fewer than 2\*\*31",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_say_why(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(GraphoptError, match=message):
        call()


# --- in programs -----------------------------------------------------------------------------------------------------


def everything() -> tuple[Any, ...]:
    """Arguments of ``accumulate_``, each of a kind of its own."""
    u, v, parameter = torch.randn(20), torch.randn(20), torch.randn(5, 4)
    return torch.randn(4, 5).bfloat16().t(), u, v, 0.9, False, torch.ones(()), torch.ones(1), parameter, 0.1


def gathered() -> torch.Tensor:
    return torch.cat([pack([INDICES, INDICES], [torch.randn(2)] * 2, torch.bfloat16) for _ in range(2)])


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "accumulate_": (accumulate_, lambda: (torch.randn(4, 5), torch.randn(20), torch.randn(20), 0.9, True)),
    "accumulate_ with everything": (accumulate_, everything),
    "accumulate_ without momentum": (accumulate_, lambda: (torch.randn(4, 5), None, torch.randn(20), 0.0, False)),
    "select": (select, lambda: (torch.randn(20), 3)),
    "select nothing": (select, lambda: (torch.randn(20), 0)),
    "clear_at_": (clear_at_, lambda: (torch.randn(20), INDICES)),
    "keep_rest_": (keep_rest_, lambda: (torch.randn(20), INDICES, torch.randn(2).bfloat16())),
    "to_wire": (to_wire, lambda: (torch.randn(3), torch.float16)),
    "pack": (pack, lambda: ([INDICES, INDICES], [torch.randn(2), torch.randn(2).double()], torch.bfloat16)),
    "sum_sparse": (sum_sparse, lambda: (gathered(), 2, [2, 2], [20, 30], torch.bfloat16, torch.float32, 0.5)),
}


@pytest.mark.sweep(cases=("accumulate_", "accumulate_ with everything"))
@pytest.mark.parametrize("name", list(CALLS))
def test_example_runs_agree_with_real_ones(name: str) -> None:
    op, arguments = CALLS[name]
    torch.library.opcheck(op, arguments())


@pytest.mark.parametrize("name", list(CALLS))
def test_each_op_is_one_call_of_a_program(name: str) -> None:
    op, arguments = CALLS[name]
    traced = make_fx(lambda arguments: op(*arguments))(arguments())
    made = [node for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert [node.target for node in made] == [op]
    mutated = schema.mutated_inputs(made[0])
    written = [index for index, argument in enumerate(op._schema.arguments) if argument.alias_info]
    assert mutated == [made[0].args[index] for index in written if made[0].args[index] is not None]
    assert schema.has_effect(made[0]) is bool(mutated)
    assert not schema.is_random(made[0])


def test_a_parameter_that_requires_a_gradient_can_be_read() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    v = torch.zeros(4)
    accumulate_(torch.ones(4), None, v, 0.0, False, None, None, parameter, 0.5)
    assert v.tolist() == [1.5] * 4
