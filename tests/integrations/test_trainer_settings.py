"""The Trainer of whole steps: what it refuses, what it makes of its settings, and the batch that it plans."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import graphopt
from graphopt import GraphoptError, PipelineError
from graphopt.integrations.transformers import STATE_FILE, Trainer
from graphopt.passes import ClipGradients, FitMemory, Recompute
from graphopt.runtime.drop_in import requirements
from tests.support.loops import Rows, bert, gpt

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about itself


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "max_steps": 2}
    return transformers.TrainingArguments(str(folder), **{**quiet, **options})


def trained(trainer: Trainer, *args: Any, **options: Any) -> Trainer:
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(*args, **options)
    return trainer


@pytest.mark.parametrize("name", ["torch_compile", "deepspeed", "fsdp"])
def test_settings_that_a_step_cannot_follow(name: str, tmp_path: Path) -> None:
    given = arguments(tmp_path)
    setattr(given, name, True)
    with pytest.raises(GraphoptError, match=rf"(?s)cannot follow these settings: {name}: .*hand graphopt.optimize"):
        Trainer(gpt(), given)
    with pytest.raises(GraphoptError, match=name):
        Trainer(model=gpt(), args=given)


def test_models_that_a_step_cannot_be_made_of(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match="optimized already"):
        Trainer(graphopt.optimize(gpt()), arguments(tmp_path))
    model = gpt()
    four_bits = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model.lm_head = four_bits(32, 64)
    with pytest.raises(GraphoptError, match=r"'lm_head' has quantized weights \(Linear4bit\)"):
        Trainer(model, arguments(tmp_path))


def test_passes_that_are_asked_for_twice(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match=r"max_grad_norm=1.0 clips too: set it to 0"):
        Trainer(gpt(), arguments(tmp_path), passes=[ClipGradients(2.0)])
    with pytest.raises(GraphoptError, match="budget= stands for the pass fit-memory"):
        Trainer(gpt(), arguments(tmp_path), passes=[FitMemory("1GB")], budget="1GB")
    with pytest.raises(PipelineError, match="there is no pass called 'recomputee'"):
        Trainer(gpt(), arguments(tmp_path), passes="recomputee")


def test_there_is_no_step_before_training(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match=r"call train\(\) first"):
        Trainer(gpt(), arguments(tmp_path)).step.program.to_text()


class Listening(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Where others look at gradients."""


@pytest.mark.sweep
def test_a_checkpoint_without_the_state_of_a_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = arguments(tmp_path, save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    rows = Rows(8, classes=True)
    with caplog.at_level(logging.WARNING, "graphopt"):
        trained(Trainer(bert(), saving, train_dataset=rows, callbacks=[Listening()]))
        state = tmp_path / "checkpoint-1" / STATE_FILE
        assert torch.load(state, weights_only=True)["steps"] == 1
        assert "Listening.on_pre_optimizer_step is called behind the update" in caplog.text
        assert STATE_FILE not in caplog.text
        state.unlink()
        again = Trainer(bert(), saving, train_dataset=rows)
        trained(again, resume_from_checkpoint=str(state.parent))
    assert again.state.global_step == 2
    assert f"checkpoint-1 has no {STATE_FILE}" in caplog.text


@pytest.mark.sweep
def test_the_batch_is_planned(tmp_path: Path) -> None:
    rows = Rows(64, classes=True)
    finding = arguments(tmp_path, auto_find_batch_size=True, max_steps=1)
    trainer = Trainer(bert(), finding, train_dataset=rows, passes=[Recompute("auto")])
    trainer._budget = trainer_budget = 700_000  # without FitMemory, whose search takes longer
    trained(trainer)
    count = trainer.state.train_batch_size
    assert 1 < count < 64
    peak = trainer.step.program.memory().peak_bytes
    assert peak <= trainer_budget < peak * (count + 2) / count


def test_a_library_that_lacks_is_named() -> None:
    with pytest.raises(ImportError, match=r"needs no_such_library, .* pip install 'none\[such\]'") as found:
        requirements.required("no_such_library", "'none[such]'")
    assert isinstance(found.value, GraphoptError)
