"""Named streams of random numbers: in eager code, around programs, on several ranks, saved and loaded."""

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
from graphopt import GraphoptError
from graphopt.passes import Recompute
from graphopt.runtime.state.random_streams import MODEL_PARALLEL, REPLICATED, RandomStreams
from tests.support.properties import examples
from tests.support.training import Blocks, next_token


def streams(*names: str) -> RandomStreams:
    found = RandomStreams()
    for seed, name in enumerate(names):
        found.add(name, seed)
    return found


def drawn(found: RandomStreams, name: str, count: int = 3) -> torch.Tensor:
    with found.using(name):
        return torch.rand(count)


def seeded(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_a_stream_goes_on_where_it_was_left() -> None:
    found = streams("a", "b")
    torch.manual_seed(7)
    parts = [drawn(found, "a"), drawn(found, "b"), drawn(found, "a")]
    assert torch.equal(torch.cat([parts[0], parts[2]]), seeded(0, 6))
    assert torch.equal(parts[1], seeded(1, 3))
    assert torch.equal(torch.rand(3), seeded(7, 3))


@examples(20)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "outside"]), st.integers(1, 4)), max_size=12))
def test_streams_do_not_see_each_other(draws: list[tuple[str, int]]) -> None:
    """Whatever the order, each stream gives what its own generator gives."""
    found = streams("a", "b")
    alone = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(("a", "b", "outside"))}
    torch.manual_seed(2)
    for name, count in draws:
        expected = torch.randn(count, generator=alone[name])
        if name == "outside":
            assert torch.equal(torch.randn(count), expected)
        else:
            with found.using(name):
                assert torch.equal(torch.randn(count), expected)


def test_nested_streams_and_errors_inside() -> None:
    found = streams("a", "b")
    before = torch.get_rng_state()
    parts = []

    def user_code() -> None:
        with found.using("a"):
            parts.append(torch.rand(2))
            with found.using("b"):
                parts.append(torch.rand(2))
            parts.append(torch.rand(2))
            raise RuntimeError("user code")

    with pytest.raises(RuntimeError, match="user code"):
        user_code()
    first, inner, second = parts
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inner, seeded(1, 2))
    assert torch.equal(torch.cat([first, second, drawn(found, "a", 2)]), seeded(0, 6))


def test_ranks_differ_in_one_stream_and_agree_in_the_other() -> None:
    ranks = [RandomStreams.model_parallel(seed=3, rank=rank) for rank in range(4)]
    assert ranks[0].names == (REPLICATED, MODEL_PARALLEL)
    x = torch.ones(64)
    masks: dict[str, list[torch.Tensor]] = {REPLICATED: [], MODEL_PARALLEL: []}
    for rank in ranks:
        for name, found in masks.items():
            with rank.using(name):
                found.append(F.dropout(x, 0.5))
    assert all(torch.equal(mask, masks[REPLICATED][0]) for mask in masks[REPLICATED])
    assert len({tuple(mask.tolist()) for mask in (*masks[MODEL_PARALLEL], masks[REPLICATED][0])}) == 5


def grads(model: nn.Module, rank: RandomStreams, name: str, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a step whose forward runs inside of a stream, and its backward outside."""
    model.zero_grad()
    with rank.using(name):
        loss = next_token(model, tokens)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_recompute_replays_what_a_stream_gave() -> None:
    """Forward inside of a stream, backward outside: two steps, bitwise equal to eager, and each stream goes on."""
    eager, tokens = Blocks(2, p=0.3), torch.randint(11, (2, 6))
    ours = graphopt.optimize(copy.deepcopy(eager), [Recompute("blocks.*")])
    one, other = (RandomStreams.model_parallel(seed=5, rank=1) for _ in range(2))
    for name in (MODEL_PARALLEL, REPLICATED, MODEL_PARALLEL):
        torch.manual_seed(11)
        expected, outside = grads(eager, one, name, tokens), torch.get_rng_state()
        torch.manual_seed(11)
        found = grads(ours, other, name, tokens)
        assert len(found) == len(expected)
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, expected, strict=True))
        assert torch.equal(torch.get_rng_state(), outside)
    assert_equal_states(one.state_dict(), other.state_dict())


@pytest.mark.sweep
def test_a_whole_step_inside_of_a_stream() -> None:
    tokens = torch.randint(11, (2, 6))
    losses = []
    for stream in ("a", "b", "a"):
        torch.manual_seed(0)
        model, found = Blocks(1, p=0.3), streams("a", "b")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=next_token)
        with found.using(stream):
            losses.append((step(tokens), step(tokens)))
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def assert_equal_states(one: Any, other: Any) -> None:
    assert {name: list(of) for name, of in one.items()} == {name: list(of) for name, of in other.items()}
    assert all(torch.equal(state, other[name][device]) for name, of in one.items() for device, state in of.items())


def test_states_are_saved_and_loaded() -> None:
    found, other = streams("a", "b"), streams("a", "b")
    drawn(found, "a")
    state = found.state_dict()
    expected = drawn(found, "a")
    other.load_state_dict(state)
    assert_equal_states(other.state_dict(), state)
    assert torch.equal(drawn(other, "a"), expected)
    assert torch.equal(drawn(found, "b"), drawn(other, "b"))
    assert next(iter(state["a"])) == "cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("a"), "the streams are a, b, and those of the state are b: add the same streams"),
        (lambda state: state.update(c={}), "those of the state are a, b, c"),
        (lambda state: state["b"].pop("cpu"), "the state of the stream 'b' has nothing for cpu"),
        (lambda state: state["b"].update(cpu=torch.zeros(3)), "is no generator state: it must be a uint8 tensor of"),
        (lambda state: state["b"].update(cpu="x"), "is no generator state"),
    ],
)
def test_states_that_do_not_fit_change_nothing(change: Any, message: str) -> None:
    found = streams("a", "b")
    state = found.state_dict()
    drawn(found, "a")
    before = found.state_dict()
    change(state)
    with pytest.raises(GraphoptError, match=message):
        found.load_state_dict(state)
    assert_equal_states(found.state_dict(), before)


def test_wrong_use() -> None:
    found = streams("dropout")
    with pytest.raises(GraphoptError, match="no stream called 'drop'; did you mean 'dropout'"), found.using("drop"):
        pass
    with pytest.raises(GraphoptError, match="there is a stream called 'dropout' already"):
        found.add("dropout", 4)
    with pytest.raises(GraphoptError, match="rank is at least 0, got -1"):
        RandomStreams.model_parallel(1, -1)
    with found.using("dropout"):
        with pytest.raises(GraphoptError, match="in use already"), found.using("dropout"):
            pass
        with pytest.raises(GraphoptError, match=r"state_dict\(\) inside of using\('dropout'\)"):
            found.state_dict()
        with pytest.raises(GraphoptError, match=r"load_state_dict\(\) inside of using\('dropout'\)"):
            found.load_state_dict({})


@pytest.mark.gpu
def test_streams_on_cuda() -> None:
    found = streams("a", "b")
    torch.cuda.manual_seed(9)
    with found.using("a"):
        first = torch.rand(4, device="cuda")
    outside = torch.rand(4, device="cuda")
    with found.using("a"):
        second = torch.rand(4, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    assert torch.equal(first, torch.rand(4, device="cuda", generator=generator))
    assert torch.equal(second, torch.rand(4, device="cuda", generator=generator))
    assert torch.equal(outside, torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(9)))
    assert set(found.state_dict()["a"]) == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
