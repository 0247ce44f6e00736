"""What Dynamo does not look at, behind torch.compile and in parts: looked at all the same, or said by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.errors import GraphBreakError
from tests.support.bits import first_difference

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.linspace(-1, 1, 12).view(3, 4)
DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "parts": lambda model: graphopt.optimize(model),
    "torch.compile": lambda model: torch.compile(model, backend="graphopt"),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Cut(nn.Module):
    """Computes before and behind a place where torch cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    def forward(self, x: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        x = self.act(self.first(x))
        if x.detach().abs().max() > 1e9:
            return x
        return self.second(x).tanh() * torch.ones(4).copysign(torch.tensor(share))


def trained(call: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor | None]:
    model.zero_grad()
    result = call(*args, **kwargs)
    result.sum().backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_follows(door: str, change: Callable[[Cut], Any]) -> None:
    model = Cut()
    call = DOORS[door](model)
    assert first_difference(trained(call, model, X), trained(model.forward, model, X)) == ""
    change(model)
    for _ in range(2):
        assert first_difference(trained(call, model, X), trained(model.__call__, model, X)) == ""


@pytest.mark.parametrize("door", DOORS)
def test_hooks_that_are_registered_later(door: str) -> None:
    assert_follows(door, lambda model: model.first.register_forward_hook(lambda module, args, y: y * 3))
    assert_follows(door, lambda model: model.second.register_forward_pre_hook(lambda module, args: (args[0] * 3,)))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("hooked", [nn.Linear, nn.Module], ids=["some", "all"])
def test_a_hook_of_all_modules_that_is_registered_later(door: str, hooked: type[nn.Module]) -> None:
    model = Cut()
    call = DOORS[door](nn.Sequential(model))

    def hook(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor | None:
        outermost = type(module).__name__ in ("OptimizedModule", "Sequential")  # around which torch calls it once more
        return y * 3 if isinstance(module, hooked) and not outermost else None

    trained(call, model, X)
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        for _ in range(2):
            assert first_difference(trained(call, model, X), trained(model, model, X)) == ""
    finally:
        handle.remove()
    assert first_difference(trained(call, model, X), trained(model, model, X)) == ""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
        (Cut, "act", lambda self, x: x * 3.0),
        (torch.Tensor, "relu", lambda self: self * 3.0),
    ],
    ids=["of a layer", "of the model", "of tensors"],
)
def test_methods_that_are_replaced(
    owner: Any, name: str, other: Any, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        assert_follows(door, lambda model: patched.setattr(owner, name, other))
    model = Cut()
    call = DOORS[door](model)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, other)
        trained(call, model, X)
    assert first_difference(trained(call, model, X), trained(model, model, X)) == "", "as it was before"


@pytest.mark.parametrize("door", DOORS)
def test_minus_zero(door: str) -> None:
    model = Cut()
    call = DOORS[door](model)
    for share in (0.0, -0.0, 0.0):
        assert first_difference(trained(call, model, X, share), trained(model, model, X, share)) == ""


def folded(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    for other in others.values():
        x = x * 1.5 + other
    return x


def handing_on(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    return folded(x, **others)


def test_the_order_of_keywords() -> None:
    compiled = torch.compile(handing_on, backend="graphopt")
    x, (u, v) = X.clone().requires_grad_(), torch.randn(2, 3, 4)
    for others in ({"u": u, "v": v}, {"v": v, "u": u}, {"u": u, "v": v}):
        assert torch.equal(compiled(x, **others), handing_on(x, **others))


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


def test_a_model_that_asks_whether_it_is_compiled_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(Asks(), backend="graphopt")
    with caplog.at_level(logging.WARNING, "graphopt"):
        for rows in (3, 3, 2):
            compiled(X[:rows]).sum().backward()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the code of Asks asks torch.compiler.is_compiling, which is true while")


@pytest.mark.parametrize("given", ["attention_mask", "position_ids", ""])
def test_a_mask_that_torch_keeps_is_told(given: str, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, use_cache=False, num_hidden_layers=1, **sizes))
    tokens = torch.randint(16, (2, 8))
    options = {"attention_mask": torch.ones_like(tokens), "position_ids": torch.arange(8).expand(2, 8)}
    compiled: Any = torch.compile(model, backend="graphopt")
    with caplog.at_level(logging.WARNING, "graphopt"):
        for _ in range(2):
            compiled(input_ids=tokens, labels=tokens, **{given: options[given]} if given else {}).loss.backward()
    assert [r.getMessage()[:56] for r in caplog.records] == ["LlamaForCausalLM keeps its attention mask where torch cu"]


def test_other_backends_keep_their_results() -> None:
    torch.manual_seed(0)
    model = Cut()
    expected = trained(model, model, X)
    before = trained(torch.compile(model, backend="aot_eager"), model, X)
    ours = copy.deepcopy(model)
    assert first_difference(trained(torch.compile(ours, backend="graphopt"), ours, X), expected) == ""
    after = trained(torch.compile(model, backend="aot_eager"), model, X)
    assert first_difference(before, expected) == first_difference(after, expected) == ""


class Named(nn.Module):
    """Looks at a text, so that torch makes a graph for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.linear(x).relu() * len(name)


def test_a_budget_holds_behind_the_limit_of_torchs_graphs_or_an_error_says_so() -> None:
    model = Named()
    compiled = torch.compile(model, backend="graphopt", options={"budget": "100%"})
    with torch._dynamo.config.patch(recompile_limit=2):
        for name in ("a", "bb"):
            compiled(X, name).sum().backward()
        with pytest.raises(GraphBreakError, match=r"forward.* has had as many graphs(.|\n)*would not hold(.|\n)*limit"):
            compiled(X, "ccc")
        assert torch.equal(compiled(X, "bb"), model(X, "bb"))


def test_going_over_to_eager_mode_is_said_in_the_call_that_does(caplog: pytest.LogCaptureFixture) -> None:
    model = Named()
    compiled = torch.compile(model, backend="graphopt")
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "graphopt"):
        for name in ("a", "bb", "ccc", "dddd"):
            assert torch.equal(compiled(X, name), model(X, name))
            assert ("runs in eager mode since" in caplog.text) == (len(name) > 2)
    assert caplog.text.count("runs in eager mode since") == 1
    assert "runs in eager mode since" in graphopt.compiled_graphs(compiled)[-1].reason
