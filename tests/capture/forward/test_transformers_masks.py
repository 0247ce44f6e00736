"""Masks that hide nothing and positions that count up are left to the attention kernel where eager mode leaves them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import graphopt
from graphopt.capture.forward.transformers_masks import Question, Questions
from graphopt.ir.files.checked_json import Field
from graphopt.passes import FitMemory, Recompute
from graphopt.runtime.programs.binding import Binding
from graphopt.runtime.stored.capture_content import read_questions, write_questions
from tests.support.tiny_models import Batch
from tests.support.training import Training, assert_same, train
from tests.support.zoo import GROUPED, WIDE, own_loss

LENGTH = 12
MASK, POSITIONS = "attention_mask", "position_ids"


def tokens(length: int = LENGTH, **options: torch.Tensor) -> Batch:
    found = torch.randint(2, 60, (2, length))
    return {"input_ids": found, "labels": found.clone(), **options}


def whole(length: int = LENGTH) -> Batch:
    """A batch with a mask that hides nothing."""
    return tokens(length, attention_mask=torch.ones(2, length, dtype=torch.long))


def padded(length: int = LENGTH) -> Batch:
    batch = whole(length)
    batch["attention_mask"][0, length // 2 :] = 0
    return batch


def counted() -> Batch:
    return tokens(position_ids=torch.arange(LENGTH).expand(2, LENGTH).contiguous())


def packed() -> Batch:
    """Two sequences in each row."""
    return tokens(position_ids=torch.arange(LENGTH // 2).repeat(2, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1})
    return _undropped(transformers.LlamaForCausalLM(config))


def bert() -> nn.Module:
    return _undropped(transformers.BertForMaskedLM(transformers.BertConfig(**{**WIDE, "num_hidden_layers": 1})))


@pytest.fixture(params=[llama, bert])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return request.param()


def _undropped(made: nn.Module) -> nn.Module:
    """The model with the attention kernel of one that draws nothing, and without a cache."""
    made.config.use_cache = False
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return made.train()


def whole_step(model: nn.Module, batches: Sequence[Batch], **options: Any) -> tuple[Training, graphopt.TrainStep]:
    optimizer, found = adamw(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, loss=own_loss, **options)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(batch))
    return found.end(model, optimizer), step


def assert_equal_to_eager(model: nn.Module, batches: Sequence[Batch], **options: Any) -> int:
    """Compare a drop-in model and a whole step with eager mode; how many programs the drop-in model has."""
    eager = train(copy.deepcopy(model), adamw, own_loss, [(batch,) for batch in batches])
    drop_in = graphopt.optimize(copy.deepcopy(model), **options)
    assert_same(eager, train(drop_in, adamw, own_loss, [(batch,) for batch in batches]), "drop-in")
    stepped, _ = whole_step(copy.deepcopy(model), batches, **options)
    assert_same(eager, stepped, "whole step", skip=".gradient")
    return len(drop_in._graphopt.runner.captures.all())


@pytest.mark.sweep(cases=("bert",))
def test_a_mask_counts_where_it_hides_something(model: nn.Module) -> None:
    assert assert_equal_to_eager(model, [whole(), padded(), whole(), padded()]) == 2


@pytest.mark.sweep
def test_positions_count_where_they_are_of_several_sequences() -> None:
    assert assert_equal_to_eager(llama(), [counted(), packed(), counted()]) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("passes", [Recompute("auto"), FitMemory("98%", cost="roofline")], ids=lambda one: one.name)
def test_each_answer_is_a_capture_whatever_the_pass(model: nn.Module, passes: graphopt.Pass) -> None:
    assert assert_equal_to_eager(model, [padded(), whole(), padded()], passes=[passes]) == 2


@pytest.mark.sweep
def test_sizes_vary_for_each_answer(model: nn.Module) -> None:
    """The second size opens the axis for all answers: two captures for masks that hide nothing, one for the others."""
    batches = [make(length) for length in (8, 12, 10, 14) for make in (whole, padded)]
    assert assert_equal_to_eager(model, batches) <= 4


@pytest.mark.sweep
def test_without_a_mask_sizes_vary_without_one() -> None:
    batches = [tokens(length) for length in (8, 12, 10, 14)]
    model = llama()
    assert assert_equal_to_eager(model, batches) == 2
    drop_in = graphopt.optimize(model)
    for batch in batches:
        own_loss(drop_in, batch)
    assert "attn_mask" not in drop_in.program.to_text()


@pytest.mark.sweep
def test_a_mask_that_hides_nothing_is_not_in_the_program(model: nn.Module) -> None:
    drop_in = graphopt.optimize(model)
    texts = []
    for batch in (whole(), padded()):
        own_loss(drop_in, batch)
        texts.append(drop_in.program.to_text())
    hidden = [text.count("attn_mask") for text in texts]
    assert hidden[0] == 0 < hidden[1]


@pytest.mark.sweep
def test_a_program_by_itself_serves_any_mask(model: nn.Module) -> None:
    """Nobody looks again before it runs."""
    program = graphopt.capture(model, (), whole(), loss=True)
    batch = padded()
    inputs = Binding(program, model).gather(list(batch.values()))
    with torch.no_grad():
        found = program.to_graph_module().forward(inputs)
    named = dict(zip((spec.role for spec in program.outputs), found, strict=True))
    assert torch.equal(named["loss"], own_loss(model, batch))


class Written(nn.Module):
    """Writes into its mask before the model looks at it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Any:
        mask = batch["attention_mask"].clone()
        mask[:, -2:] = 0
        return self.inner(**{**batch, "attention_mask": mask})


@pytest.mark.sweep
def test_what_has_been_written_is_not_the_mask_of_the_call(model: nn.Module) -> None:
    wrapped = Written(model)

    def loss(module: nn.Module, batch: Batch) -> torch.Tensor:
        return module(batch).loss

    batches = [(whole(),), (padded(),)]
    eager = train(copy.deepcopy(wrapped), adamw, loss, batches)
    assert_same(eager, train(graphopt.optimize(copy.deepcopy(wrapped)), adamw, loss, batches), "drop-in")


@pytest.mark.sweep
@pytest.mark.parametrize("order", [(whole, padded), (padded, whole)], ids=["whole first", "padded first"])
def test_answers_are_kept_with_what_is_stored(
    model: nn.Module, order: Sequence[Callable[[], Batch]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "1")
    for turn in (order, order[::-1]):
        assert assert_equal_to_eager(model, [make() for make in (*turn, *turn)]) == 2


def test_a_saved_step_asks_again(tmp_path: Path) -> None:
    model = llama()
    batches = [whole(), padded(), whole()]
    eager = train(copy.deepcopy(model), adamw, own_loss, [(batch,) for batch in batches])
    _, step = whole_step(copy.deepcopy(model), batches[:2])
    step.save(tmp_path / "step")
    again = copy.deepcopy(model)
    optimizer, found = adamw(again.parameters()), Training()
    loaded = graphopt.load_step(tmp_path / "step", again, optimizer, loss=own_loss)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", loaded(batch))
    assert_same(eager, found.end(again, optimizer), "loaded step", skip=".gradient")


@pytest.mark.sweep
def test_where_ranks_train_together_the_mask_stays_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks whose batches answer otherwise would capture, and plan, alone."""
    two = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(sys.modules[Questions.__module__], "dist", two)
    drop_in = graphopt.optimize(llama())
    for batch in (whole(), padded()):
        own_loss(drop_in, batch)
    assert len(drop_in._graphopt.runner.captures.all()) == 1
    assert "attn_mask" in drop_in.program.to_text()
    assert [r.levelname for r in caplog.records if "keeps the mask" in r.message] == ["WARNING"]


def test_a_stored_answer_that_is_no_answer_is_refused() -> None:
    tensors = [torch.ones(2, 3, dtype=torch.long), torch.tensor(1)]
    good = {Question(0, "hides nothing"): True, Question(0, "counts up"): False}
    assert read_questions(Field(write_questions(good)), tensors) == good
    for wrong in (
        [[0, "hides nothing", False]],
        [[0, "hides nothing", 1]],
        [[1, "counts up", True]],
        [[2, "is all ones", True]],
        [[-1, "is all ones", True]],
        [[0, "__class__", True]],
        [[0, "is all ones"]],
        {"0": True},
    ):
        with pytest.raises(graphopt.GraphoptError):
            read_questions(Field(wrong), tensors)
