"""Mixed precision on small programs: what is cast where, what is left alone, and what the user may choose."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase, Pipeline
from graphopt.errors import GraphoptError, PassError
from graphopt.ir.node import info, value_of
from graphopt.passes import MixedPrecision
from graphopt.rewriting.precision import parameter_casts
from graphopt.rewriting.precision.casts import is_cast
from tests.support.casting import (
    LOW,
    assert_same_as_under_autocast,
    casts,
    dtype_of,
    forward_program,
    loss_and_gradients,
    made_by,
    rewrite_all,
    under,
)
from tests.support.properties import examples
from tests.support.running import Mixed
from tests.support.training import OPTIMIZERS, Net, assert_same, identical, mean_square, train, train_whole_step

X = torch.linspace(-1, 1, 32).reshape(4, 8)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    """Attention-like: one activation feeds three linears, a softmax, a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = F.softmax(self.q(y) @ self.k(y).T, dim=-1)
        return x + weights @ self.v(y)


def blocks(count: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(*(Block() for _ in range(count)))


# --- what is cast ----------------------------------------------------------------------------------------------------


def test_matrix_products_run_in_the_low_dtype_and_outputs_stay_float32() -> None:
    program = forward_program(blocks(1), (X,), MixedPrecision())
    assert set(made_by(program, "linear")) == set(made_by(program, "matmul")) == {BF16}
    assert set(made_by(program, "layer_norm")) == {F32}
    assert [value_of(value).dtype for value in program.output_values] == [F32]
    program = forward_program(Net(nn.Linear(8, 8)), (X,), MixedPrecision("float16"))
    assert made_by(program, "linear") == [F16]
    assert [value_of(value).dtype for value in program.output_values] == [F32]
    assert [info(node).origin for node in casts(program)][-1] == "mixed-precision: as in the plain program"


@pytest.mark.sweep
def test_a_parameter_is_cast_once_in_front_of_its_first_use_and_can_be_found_at_every_stage() -> None:
    model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.net[2].weight = model.net[0].weight
    for level in ("O1", "O2"):
        rewritten = rewrite_all(model, (X,), [MixedPrecision(level=level)])
        for program in rewritten.stages.values():
            found = parameter_casts(program)
            assert len(found) == 3
            assert {value_of(node).dtype for node in found.values()} == {BF16}
            weights = [node for name, node in found.items() if name.endswith("weight")]
            assert len(weights) == 1
            assert set(program.find("**.bfloat16").values()) == set(found.values())
    first = next(node for node in rewritten.stages["forward"].graph.nodes if node.op == "call_function")
    assert is_cast(first), "level O2 casts parameters at the beginning"


@pytest.mark.sweep(cases=("float16",))
@pytest.mark.parametrize("dtype", LOW)
def test_tied_weights_gather_their_gradient_as_autocast_does(dtype: str) -> None:
    model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model.net[2].weight = model.net[0].weight
    assert_same_as_under_autocast(model, (X,), dtype, [MixedPrecision(dtype, scale_loss=False)])


@pytest.mark.sweep
def test_frozen_parameters_and_inputs_that_need_gradients_are_as_under_autocast() -> None:
    model = blocks(1)
    model.net[0].q.weight.requires_grad_(False)
    batch = [(X.clone().requires_grad_(True),)]
    eager = train(copy.deepcopy(model), OPTIMIZERS["sgd"], under("bfloat16"), batch)
    drop_in = graphopt.optimize(copy.deepcopy(model), [MixedPrecision()])
    stepped = train_whole_step(copy.deepcopy(model), OPTIMIZERS["sgd"], mean_square, batch, [MixedPrecision()])
    assert_same(eager, stepped, "whole step", skip=".gradient.")
    result = drop_in(*batch[0])
    result.sum().backward()
    assert drop_in.net[0].q.weight.grad is None
    assert batch[0][0].grad.dtype == F32


def test_integers_float64_and_complex_numbers_are_left_alone() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).double()

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
            wide = self.b(x.double())
            return self.a(x) * n, wide, torch.fft.fft(wide).abs(), n + 1

    program = forward_program(Counts(), (X, torch.ones(8, dtype=torch.int64)), MixedPrecision(level="O2"))
    assert [value_of(v).dtype for v in program.output_values] == [F32, torch.float64, torch.float64, torch.int64]
    assert made_by(program, "linear") == [torch.float64, BF16]
    assert all(value_of(node.args[0]).dtype in (F32, BF16) for node in casts(program))


def test_explicit_dtypes_of_the_user_stay() -> None:
    class Explicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).to(torch.float16).to(torch.float32)
            return torch.softmax(y.square(), dim=-1, dtype=torch.float32) * self.scale

    assert_same_as_under_autocast(Explicit(), (X,), "bfloat16", [MixedPrecision()])
    program = forward_program(Explicit(), (X,), MixedPrecision(level="O2"))
    assert made_by(program, "to") == [F16, F32]
    assert made_by(program, "softmax") == [F32]
    assert made_by(program, "linear") == [BF16]


@pytest.mark.sweep
def test_a_cast_that_a_module_asks_for_holds_in_that_module_only() -> None:
    """``x.float()`` does nothing to float32, so a capture has later readers of ``x`` read it too."""

    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float()
            return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), Norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return y + self.b(self.norm(y))

    assert_same_as_under_autocast(Residual(), (X,), "bfloat16", [MixedPrecision()])
    program = forward_program(Residual(), (X,), MixedPrecision(level="O2"))
    assert set(made_by(program, "rsqrt")) == {F32}
    assert dtype_of(program, "::add") == BF16


def test_what_a_module_hands_over_in_a_list_is_read_from_there() -> None:
    """It is no result of the module, and of the dtype of what it was made from, as a cast that does nothing is."""

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
            kept.append(x.relu())
            return x.tanh()

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.keeps = nn.Linear(8, 8), Keeps()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept: list[torch.Tensor] = []
            y = self.keeps(x, kept)
            return y + self.layer(kept[0]) + kept[0].exp()

    assert_same_as_under_autocast(Reads(), (X,), "bfloat16", [MixedPrecision()])


@pytest.mark.sweep
def test_regions_of_the_users_own_stay_as_they_are() -> None:
    model = Mixed()
    plain = graphopt.capture(model, (X,), loss=mean_square)
    assert_same_as_under_autocast(model, (X,), "bfloat16", [MixedPrecision()])
    with torch.autocast("cpu", dtype=BF16):
        rewritten = rewrite_all(blocks(1), (X,), [MixedPrecision()])
    assert rewritten.records[0].changed.reason == "every op runs in the wanted dtype already"
    assert len(casts(rewrite_all(model, (X,), [MixedPrecision()]).program)) <= len(casts(plain)) + 1


def test_what_runs_without_gradients_is_cast_too() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.a(x)
            return self.b(y) * y

    assert_same_as_under_autocast(Frozen(), (X,), "bfloat16", [MixedPrecision()])


class Product(torch.autograd.Function):
    """A user's own function, whose forward autocast acts in."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return g.float() @ w.T, x.T @ g.float()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.a = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(Product.apply(x, self.w))


def test_custom_functions_run_under_autocast() -> None:
    assert_same_as_under_autocast(Custom(), (X,), "bfloat16", [MixedPrecision()])


class Composite(nn.Module):
    """Ops made of others, inside of which autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("ij,kj->ik", x, self.w)
        y = torch.einsum("ij,jk->ik", y, self.w) + torch.einsum("ij,jk->ik", self.w[:4], y.mT @ y)
        z = torch.tensordot(x, self.w, dims=([1], [0]))
        return torch.cosine_similarity(y[:, :4], z[:, :4])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", LOW)
def test_composite_ops_are_taken_apart_where_autocast_acts_inside_of_them(dtype: str) -> None:
    assert_same_as_under_autocast(Composite(), (X,), dtype, [MixedPrecision(dtype, scale_loss=False)])
    program = forward_program(Composite(), (X,), MixedPrecision(dtype, scale_loss=False))
    assert not made_by(program, "einsum")
    assert LOW[dtype] in made_by(program, "bmm")
    parts = [info(node).origin for node in program.graph.nodes if node.op == "call_function"]
    assert "mixed-precision: part of einsum" in parts


class Recurrent(nn.Module):
    """A layer of recurrent cells, whose weights autocast casts once for all steps."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.inner, self.b = nn.Linear(8, 8), kind(8, 8, **options), nn.LazyLinear(8)
        self.b(torch.zeros(1, 16 if options.get("bidirectional") else 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.inner(self.a(x))
        return self.b(result[0] if isinstance(result, tuple) else result)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GRU, {}),
        (nn.GRU, {"bidirectional": True, "num_layers": 2, "dropout": 0.3}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "dropout": 0.3}),
    ],
)
def test_recurrent_layers_are_cast_step_by_step(dtype: str, kind: type[nn.Module], options: dict[str, Any]) -> None:
    passes = [MixedPrecision(dtype, scale_loss=False)]
    assert_same_as_under_autocast(Recurrent(kind, **options), (torch.randn(5, 3, 8),), dtype, passes)


class ReadsDtypes(nn.Module):
    """What many models do: compute in float32, and go back to the dtype that came in."""

    def __init__(self, last: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.weight = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.last = last

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.norm(self.a(x))
        scores = torch.softmax(self.b(q) @ q.mT, -1, dtype=torch.float32).to(q.dtype)
        made = torch.zeros(scores.shape, dtype=self.a(x).dtype) + scores
        y = made @ self.b(x)
        return y.to(self.a(x).dtype) if self.last == "read" else y


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("last", ["computed", "read"])
def test_python_reads_the_dtypes_that_tensors_have_under_autocast(dtype: str, last: str) -> None:
    passes = [MixedPrecision(dtype, scale_loss=False)]
    assert_same_as_under_autocast(ReadsDtypes(last), (X,), dtype, passes)
    output = graphopt.optimize(ReadsDtypes(last), passes)(X)
    with torch.autocast("cpu", dtype=LOW[dtype]):
        theirs = ReadsDtypes(last)(X)
    assert (output.dtype, theirs.dtype) == (torch.float32, LOW[dtype])
    assert identical(output, theirs.float())


@pytest.mark.sweep
def test_an_output_in_low_precision_without_the_pass_is_so_with_it() -> None:
    model = ReadsDtypes("computed").to(BF16)
    assert graphopt.optimize(model, [MixedPrecision()])(X.to(BF16)).dtype == BF16


def test_a_program_captured_without_autocast_says_so() -> None:
    program = graphopt.capture(blocks(1), (X,), stage="forward")
    (record,) = Pipeline([MixedPrecision()]).run(program)
    assert any(line.startswith("captured without autocast") for line in record.changed.lines)


@pytest.mark.sweep(but=("O1",))
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_statistics_of_batch_norm_stay_float32_and_are_eagers(level: str) -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    batch = [(torch.randn(4, 3, 6, 6),)] * 2
    eager = train(copy.deepcopy(model), OPTIMIZERS["sgd"], under("bfloat16"), batch)
    mine = train_whole_step(copy.deepcopy(model), OPTIMIZERS["sgd"], mean_square, batch, [MixedPrecision(level=level)])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        one, other = (found.tensors[f"model.net.1.{name}"] for found in (eager, mine))
        assert one.dtype == other.dtype != BF16
        assert identical(one, other) if level == "O1" else torch.allclose(one, other, rtol=0.01, atol=0.001)


def test_a_model_in_eval_mode_runs_as_it_is() -> None:
    model = graphopt.optimize(blocks(1), [MixedPrecision()])
    model.eval()
    assert identical(model(X), blocks(1)(X))


@pytest.mark.sweep
def test_numbers_beyond_the_range_of_the_low_dtype_become_its_limits() -> None:
    """A model that fills with the lowest number of the dtype it sees does so in the low dtype as well."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return y.masked_fill(x > 0.5, torch.finfo(y.dtype).min).softmax(-1)

    for dtype in LOW:
        assert_same_as_under_autocast(Masked(), (X,), dtype, [MixedPrecision(dtype, scale_loss=False)])


# --- O2 --------------------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """``blocks()`` as people write O2 by hand: parameters in the low dtype, norms in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def low(linear: nn.Linear, y: torch.Tensor) -> torch.Tensor:
            return F.linear(y, self.cast[linear.weight], self.cast[linear.bias])

        self.cast = {p: p.to(self.dtype) for p in self.model.parameters()}
        for block in self.model.net:
            y = block.norm(x.float()).to(self.dtype)
            x = x.to(self.dtype)
            weights = F.softmax(low(block.q, y) @ low(block.k, y).T, dim=-1)
            x = x + weights @ low(block.v, y)
        return x


@pytest.mark.sweep(cases=("float16",))
@pytest.mark.parametrize("dtype", LOW)
def test_o2_equals_the_recipe_written_by_hand(dtype: str) -> None:
    model = blocks()
    value, gradients = loss_and_gradients(model, (X,), [MixedPrecision(dtype, level="O2", scale_loss=False)], mse)
    expected = mse(ByHand(model, LOW[dtype]), X)
    expected.backward()
    assert identical(value, expected.detach())
    for name, parameter in model.named_parameters():
        assert identical(gradients[name], parameter.grad), name


def mse(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss of torch's, in float32."""
    return F.mse_loss(model(x).float(), x)


def test_o2_keeps_norms_and_losses_in_float32() -> None:
    program = forward_program(blocks(), (X,), MixedPrecision(level="O2"), loss=mse)
    assert set(made_by(program, "layer_norm")) == set(made_by(program, "mse_loss")) == {F32}
    assert set(made_by(program, "softmax")) == set(made_by(program, "add")) == set(made_by(program, "linear")) == {BF16}
    assert not [name for name in parameter_casts(program) if "norm" in name]


# --- the joint program -----------------------------------------------------------------------------------------------


def test_casts_up_and_back_down_vanish_and_casts_down_and_back_up_stay() -> None:
    class UpDown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.b(self.a(x).float())
            return self.c(x.to(torch.bfloat16).float().square()) + y

    rewritten = rewrite_all(UpDown(), (X,), [MixedPrecision()])
    assert rewritten.records[1].changed.counts["cancelled"] >= 1
    for node in casts(rewritten.program, Phase.FORWARD):
        source = node.args[0]
        assert not (is_cast(source) and value_of(source.args[0]).dtype == value_of(node).dtype == BF16)
    rounded = [n for n in casts(rewritten.program) if value_of(n).dtype == F32 and is_cast(n.args[0])]
    assert rounded, "rounding to bfloat16 is not the identity"
    assert_same_as_under_autocast(UpDown(), (X,), "bfloat16", [MixedPrecision()])


@pytest.mark.sweep
def test_what_forward_casts_up_is_kept_low_and_cast_up_again() -> None:
    program = rewrite_all(blocks(), (X,), [MixedPrecision(level="O2")]).program
    again = casts(program, Phase.RECOMPUTE)
    assert [value_of(node).dtype for node in again] == [F32] * len(again)
    assert again
    assert all(info(node).origin == "mixed-precision: the same cast again" for node in again)


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_application_does_nothing(level: str) -> None:
    mixed = MixedPrecision(level=level, deny=("**.k",))
    rewritten = rewrite_all(blocks(), (X,), [mixed], mse)
    for program in rewritten.stages.values():
        before = program.to_text()
        changed = mixed.apply(program)
        assert not changed, changed
        assert changed.reason
        assert program.to_text() == before


# --- allow and deny --------------------------------------------------------------------------------------------------


def linears(**options: tuple[str, ...]) -> list[torch.dtype]:
    """The dtypes of q, k and v in both blocks."""
    return made_by(forward_program(blocks(), (X,), MixedPrecision(**options)), "linear")


def test_ops_tensors_modules_and_globs_can_be_denied() -> None:
    assert linears() == [BF16] * 6
    assert linears(deny=("linear",)) == linears(deny=("aten.linear",)) == linears(deny=("aten.linear.*",)) == [F32] * 6
    assert linears(deny=("net.0",)) == [F32] * 3 + [BF16] * 3
    assert linears(deny=("net.*.k",)) == [BF16, F32, BF16] * 2
    assert linears(deny=("net.1.q::linear",)) == [BF16] * 3 + [F32, BF16, BF16]
    assert linears(deny=("net.0.v.weight",)) == [BF16, BF16, F32] + [BF16] * 3


def test_ops_tensors_and_modules_can_be_allowed() -> None:
    model = blocks()
    assert set(made_by(forward_program(model, (X,), MixedPrecision()), "layer_norm")) == {F32}
    program = forward_program(model, (X,), MixedPrecision(allow=("layer_norm",)))
    assert set(made_by(program, "layer_norm")) == {BF16}
    program = forward_program(model, (X,), MixedPrecision(allow=("net.1.norm", "net.0::add")))
    assert made_by(program, "layer_norm") == [F32, BF16]
    assert made_by(program, "add") == [BF16, BF16], "the second adds what is bfloat16 then"
    program = forward_program(model, (X,), MixedPrecision(level="O2", allow=("net.1.norm",)))
    assert made_by(program, "layer_norm") == [F32, BF16]


def test_the_more_specific_entry_counts() -> None:
    assert linears(deny=("linear",), allow=("net.0",)) == [BF16] * 3 + [F32] * 3
    assert linears(deny=("net.0",), allow=("net.0.q",)) == [BF16, F32, F32] + [BF16] * 3
    assert linears(deny=("net.0.q",), allow=("net.0.q::linear",)) == [BF16] * 6


@pytest.mark.sweep
def test_denying_everything_leaves_float32s_bits() -> None:
    value, gradients = loss_and_gradients(blocks(), (X,), [MixedPrecision(deny=("net",))])
    plain, theirs = loss_and_gradients(blocks(), (X,), [])
    assert identical(value, plain)
    assert all(identical(gradients[name], theirs[name]) for name in theirs)


@pytest.mark.sweep
def test_denied_composites_and_custom_functions_run_in_float32() -> None:
    program = forward_program(Composite(), (X,), MixedPrecision(deny=("einsum",)))
    assert made_by(program, "einsum") == [F32] * 3
    with pytest.raises(PassError, match="linr"):
        forward_program(Custom(), (X,), MixedPrecision(deny=("linr",)))


def test_allowing_batch_norm_leaves_its_statistics_alone() -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    program = forward_program(model, (torch.randn(4, 3, 6, 6),), MixedPrecision(level="O2", allow=("batch_norm",)))
    assert made_by(program, "batch_norm") == [BF16]
    assert not [name for name in program.names() if "running" in name and name.endswith("bfloat16")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8' is not known; did you mean 'float16'"),
        ({"level": "O3"}, "level='O3' is not known; it is 'O1', 'O2'"),
        ({"allow": ("linear", "softmax"), "deny": ("softmax",)}, "'softmax' cannot be in both allow= and deny="),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        MixedPrecision(**options)  # type: ignore[arg-type]


@pytest.mark.sweep(but=("options2-allow= and deny= both name 'linear' .*more specific",))
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"deny": ("net.0.qq",)},
            r"'net.0.qq' in allow= or deny= names no op, tensor or module; did you mean 'net.0.q'",
        ),
        ({"allow": ("liner", "net.*.z")}, r"'liner' .*did you mean 'linear'.*\n'net.\*.z' .*"),
        ({"allow": ("net.0.*",), "deny": ("net.0.q",)}, "allow= and deny= both name 'linear' .*more specific"),
        ({"allow": ("aten.linear",), "deny": ("aten.lin*",)}, "both name the same ops or tensors"),
    ],
)
def test_entries_that_match_nothing_or_contradict_each_other_are_errors(
    options: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(PassError, match=message):
        linears(**options)


def test_an_op_without_a_kernel_is_named_with_its_module_and_what_to_deny() -> None:
    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.pdist(self.a(x))

    for options in ({"allow": ("pdist",)}, {"level": "O2"}):
        message = r"pdist.* in bf16 has no kernel on this device: .*\n  where: .*in forward\n.*deny=\("
        with pytest.raises(PassError, match=message):
            forward_program(Solve(), (X,), MixedPrecision(**options))
    program = forward_program(Solve(), (X,), MixedPrecision(level="O2", deny=("pdist",)))
    assert made_by(program, "pdist") == [F32]


def test_an_op_that_refuses_low_precision_by_itself_is_named_too() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return torch.linalg.inv(y @ y.T + torch.eye(4))

    assert F32 in made_by(forward_program(Inverse(), (X,), MixedPrecision()), "linalg_inv")
    with pytest.raises(PassError, match=r"linalg_inv cannot run in mixed precision(.|\n)*deny=\('linalg_inv',\)"):
        forward_program(Inverse(), (X,), MixedPrecision(level="O2"))


# --- records and text ------------------------------------------------------------------------------------------------


def test_the_record_counts_and_folds() -> None:
    rewritten = rewrite_all(blocks(), (X,), "mixed-precision{dtype=float16 deny=linear}")
    first, second = rewritten.records
    assert first.spec == second.spec == "mixed-precision{dtype=float16 deny=linear}"
    assert (first.stage, second.stage) == ("forward", "joint")
    assert first.changed.counts["low precision ops"] == 6
    assert first.changed.lines[0] == "f16: 4 matmul, 2 softmax"
    assert first.changed.lines[1].startswith("f32: 6 linear, 2 add, 2 layer_norm")
    assert first.changed.counts["casts"] > 0
    assert first.numerics == "changes"


def test_the_text_form_goes_both_ways() -> None:
    for text in ("mixed-precision", "mixed-precision{dtype=float16 level=O2 allow=softmax deny=net.0,aten.linear}"):
        assert str(Pipeline(text)) == text


# --- any small network -----------------------------------------------------------------------------------------------

LAYERS = st.sampled_from(["linear", "norm", "gelu", "tanh", "softmax", "residual", "product", "shared", "double"])


class Drawn(nn.Module):
    """A network of drawn layers on tensors of shape ``[4, 8]``; ``shared`` uses one linear layer each time."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        torch.manual_seed(len(kinds))
        self.kinds, self.shared = kinds, nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.LayerNorm(8) if kind == "norm" else nn.Linear(8, 8) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind in ("linear", "norm"):
                x = layer(x)
            elif kind == "shared":
                x = self.shared(x)
            elif kind == "residual":
                x = x + layer(x) + first
            elif kind == "product":
                x = (x @ layer(x).T) @ x
            elif kind == "double":
                x = x.double().square().float()
            else:
                x = {"gelu": F.gelu, "tanh": torch.tanh, "softmax": lambda t: t.softmax(-1)}[kind](x)
        return self.shared(x)


@examples(3)
@given(st.lists(LAYERS, min_size=1, max_size=6), st.sampled_from(list(LOW)))
def test_any_small_network_is_as_under_autocast_and_a_second_application_does_nothing(
    kinds: list[str], dtype: str
) -> None:
    model = Drawn(kinds)
    assert_same_as_under_autocast(model, (X,), dtype, [MixedPrecision(dtype, scale_loss=False)])
    program = forward_program(model, (X,), MixedPrecision(dtype, scale_loss=False))
    before = program.to_text()
    assert not MixedPrecision(dtype, scale_loss=False).apply(program)
    assert program.to_text() == before
