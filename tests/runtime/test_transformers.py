"""Models from transformers as they come: training equals eager to the last bit, memory is predicted to the byte."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import graphopt
from graphopt import Pass, Phase, TrainStep
from graphopt.ir.node import info
from graphopt.passes import Recompute
from tests.support.training import Training, assert_same, identical, ops, results, train
from tests.support.zoo import GROUPED, VOCABULARY, ZOO, Batch, Entry, own_loss

STEPS = 4
TESTED = {"BERT": "plain", "GPT-2": "recompute", "ViT": "plain", "ResNet": "recompute", "Qwen3": "plain"}
"""The models that `make test` trains, and how; the others are left to `make sweep`."""

adamw = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


@dataclass
class Case:
    """A model and its eager training."""

    entry: Entry
    model: nn.Module
    batches: list[Batch]
    eager: Training

    @classmethod
    def of(cls, name: str) -> Case:
        torch.set_num_threads(1)
        model, pair = ZOO[name].build(2)
        batches = [pair[number % 2] for number in range(STEPS)]
        eager = train(copy.deepcopy(model), adamw, own_loss, [(batch,) for batch in batches])
        return cls(ZOO[name], model, batches, eager)

    @property
    def draws(self) -> bool:
        """Whether forward draws random numbers."""
        torch.manual_seed(0)
        before = torch.get_rng_state()
        own_loss(copy.deepcopy(self.model), self.batches[0])
        return not torch.equal(before, torch.get_rng_state())


@dataclass
class Stepped:
    """The same training with whole steps."""

    case: Case
    passes: list[Pass]
    step: TrainStep
    training: Training


known_case = functools.lru_cache(maxsize=1)(Case.of)
"""The case of a model, whose settings follow each other."""


def settings() -> Iterator[Any]:
    """Every model with and without recomputation; `make test` runs some, each in one of both ways."""
    for name, way in itertools.product(ZOO, ("plain", "recompute")):
        kept = TESTED.get(name) == way
        yield pytest.param((name, way), id=f"{name}-{way}", marks=() if kept else pytest.mark.sweep)


@pytest.fixture(scope="module", params=settings())
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The name of a model, and "plain" or "recompute"."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def case(setting: tuple[str, str]) -> Case:
    return known_case(setting[0])


@pytest.fixture(scope="module")
def passes(setting: tuple[str, str], case: Case) -> list[Pass]:
    return [Recompute(case.entry.layers)] if setting[1] == "recompute" else []


@pytest.fixture(scope="module")
def stepped(case: Case, passes: list[Pass]) -> Stepped:
    model, found = copy.deepcopy(case.model), Training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # where the user leaves it open, the fused one is taken
    step = graphopt.optimize_step(model, optimizer, passes)
    torch.manual_seed(1)
    for number, batch in enumerate(case.batches):
        found.add(f"{number}.loss", step(**batch))
    return Stepped(case, passes, step, found.end(model, optimizer))


@pytest.mark.sweep
def test_drop_in_training_is_eager_training(case: Case, passes: list[Pass]) -> None:
    optimized = graphopt.optimize(copy.deepcopy(case.model), passes)
    found = train(optimized, adamw, own_loss, [(batch,) for batch in case.batches])
    assert_same(case.eager, found, "drop-in")
    if passes:
        (record,) = optimized.records
        assert record.changed.counts["recomputed"] > 0
        assert (record.changed.counts["random ops replayed"] > 0) == case.draws


@pytest.mark.sweep
def test_whole_steps_are_eager_steps(stepped: Stepped) -> None:
    assert_same(stepped.case.eager, stepped.training, "whole step", skip=".gradient.")


@pytest.mark.sweep(but=("Qwen3-plain",))
def test_gradients_inside_of_the_step_are_eagers(stepped: Stepped) -> None:
    model, eager = copy.deepcopy(stepped.case.model), stepped.case.eager.tensors
    program = [program for _, program in stepped.step.snapshots if program.stage == "joint"][-1]
    found, _ = results(program, model, stepped.case.batches[0], seed=1)
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # tied weights have several names
    known = dict(model.named_parameters(remove_duplicate=False))
    gradients = {first[id(known[s.target])]: value for s, value in found.items() if s.role == "gradient"}
    expected = {n.removeprefix("0.gradient."): v for n, v in eager.items() if n.startswith("0.gradient.")}
    assert gradients.keys() == expected.keys()
    assert [name for name, value in expected.items() if not identical(value, gradients[name])] == []


def measured(run: Callable[[], object]) -> int:
    return graphopt.measure_peak(run).allocated_peak_bytes


def eager_peak(case: Case) -> int:
    """The peak of an eager step that is not the first."""
    model = copy.deepcopy(case.model)
    optimizer = adamw(model.parameters())

    def run() -> None:
        own_loss(model, case.batches[0]).backward()
        optimizer.step()

    run()
    optimizer.zero_grad()
    return measured(run)


@pytest.mark.sweep
def test_the_peak_is_predicted_and_not_above_eager(stepped: Stepped) -> None:
    peak = measured(lambda: stepped.step(**stepped.case.batches[0]))
    assert stepped.step.program.memory().allocated_peak_bytes == pytest.approx(peak, rel=1e-3)
    if not stepped.passes:
        assert peak <= eager_peak(stepped.case)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_the_model_becomes_segments(reentrant: bool) -> None:
    plain, batches = ZOO["BERT"].build(2)
    model = copy.deepcopy(plain)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    run = [(batch,) for batch in batches]
    eager = train(copy.deepcopy(model), adamw, own_loss, run)
    optimized = graphopt.optimize(copy.deepcopy(model))
    assert_same(eager, train(optimized, adamw, own_loss, run), "drop-in")
    assert ops(optimized.program, Phase.RECOMPUTE).count("gelu") == 2
    assert {info(node).origin for node in optimized.program.phase_nodes(Phase.RECOMPUTE)} == {"torch.utils.checkpoint"}
    without = graphopt.capture(plain, (), batches[0])
    assert optimized.program.memory().peak_bytes < without.memory().peak_bytes


# --- attention masks -------------------------------------------------------------------------------------------------

LENGTH = 300
"""Tokens from which on the kernels for a given mask and for a causal one round differently."""


def packed(length: int) -> torch.Tensor:
    """Positions of two sequences in each row."""
    return torch.arange(length).remainder(length // 2).expand(2, -1)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"position_ids": packed(LENGTH)}], ids=["one sequence", "two sequences"])
def test_a_causal_mask_is_left_to_the_kernel_where_eager_leaves_it(options: Batch) -> None:
    torch.manual_seed(0)
    changed = {"max_position_embeddings": LENGTH, "attention_dropout": 0.0, "use_cache": False}
    config = transformers.LlamaConfig(**{**GROUPED, **changed})
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(2, VOCABULARY, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens, **options}
    asked = transformers.masking_utils.find_packed_sequence_indices
    optimized = graphopt.optimize(copy.deepcopy(model))
    losses = [own_loss(made, batch) for made in (model, optimized)]
    assert transformers.masking_utils.find_packed_sequence_indices is asked
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    gradients = zip(model.named_parameters(), optimized.parameters(), strict=True)
    assert [name for (name, one), other in gradients if not identical(one.grad, other.grad)] == []
    calls = [node for node in optimized.program.nodes if str(node.target).endswith("_attention_for_cpu.default")]
    assert ["attn_mask" in call.kwargs for call in calls] == [bool(options)] * 2
