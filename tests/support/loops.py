"""Training by loops that others own, plainly and with graphopt: tiny models, data, and what is compared."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import graphopt
from graphopt.integrations.transformers import Trainer as WholeStepTrainer
from graphopt.passes import Recompute

__all__ = [
    "CASES",
    "Case",
    "Outcome",
    "Rows",
    "bert",
    "gpt",
    "llama",
    "lora",
    "outcome",
    "plain_outcome",
    "rows_padded",
]

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


def gpt(dropout: float = 0.1) -> nn.Module:
    """Tied weights, dropout, a loss that counts its labels."""
    torch.manual_seed(0)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **drop)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.LlamaConfig(**SIZES, **tokens, intermediate_size=64, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    """A classifier, whose loss is a mean over the batch."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=64)
    return transformers.BertForSequenceClassification(config)


def lora() -> nn.Module:
    """Adapters on a frozen base."""
    from peft import LoraConfig, get_peft_model

    base = llama()
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens of fixed seed; classes or the tokens themselves as labels, of one length or two."""

    def __init__(self, count: int = 24, *, lengths: tuple[int, ...] = (12,), classes: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows: list[dict[str, torch.Tensor]] = []
        for number in range(count):
            length = lengths[number % len(lengths)]
            tokens = torch.randint(1, 64, (length,), generator=generator)
            labels = torch.tensor(number % 2) if classes else tokens.clone()
            if not classes:
                labels[: number % 4] = -100
            mask = torch.ones(length, dtype=torch.long)
            self.rows.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return dict(self.rows[number])


def rows_padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows of several lengths."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}

    def pad(row: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
        return torch.nn.functional.pad(row[key], (0, longest - len(row[key])), value=fill[key])

    return {key: torch.stack([pad(row, key) for row in rows]) for key in fill}


@dataclass(frozen=True)
class Case:
    """One training by a Trainer: which model, which arguments, which data."""

    model: Callable[[], nn.Module] = gpt
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: Rows = field(default_factory=Rows)
    resume: int = 0
    trainer: Mapping[str, Any] = field(default_factory=dict)


_STEPS = {"max_steps": -1, "num_train_epochs": 2}
_SAVE = {"save_strategy": "steps", "save_steps": 2}
_BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}

CASES = {
    "defaults": Case(),
    "short last window": Case(arguments={"gradient_accumulation_steps": 4, **_STEPS}, data=Rows(20)),
    "short window of means": Case(
        bert, {"gradient_accumulation_steps": 4, **_STEPS, "label_smoothing_factor": 0.1}, Rows(20, classes=True)
    ),
    "adapters": Case(lora),
    "resumed": Case(arguments={**_SAVE, "lr_scheduler_type": "cosine"}, resume=4),
    "bf16": Case(llama, {"bf16": True}),
    "stopped early": Case(arguments={**_SAVE, **_BEST, "learning_rate": 1e-2}, trainer={"patience": 1}),
}
"""One for each class of behaviour."""

SIBLINGS = {
    "fp16": Case(llama, {"fp16": True}),
    "label smoothing": Case(arguments={"label_smoothing_factor": 0.1}),
    "gradient checkpointing": Case(arguments={"gradient_checkpointing": True}),
    "reentrant checkpointing": Case(
        llama, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "two lengths": Case(
        llama,
        {"train_sampling_strategy": "group_by_length"},
        Rows(lengths=(8, 12)),
        trainer={"data_collator": rows_padded},
    ),
    "without clipping": Case(arguments={"max_grad_norm": 0.0}),
    "SGD": Case(arguments={"optim": "sgd", "learning_rate": 0.1}),
    "Adafactor": Case(arguments={"optim": "adafactor"}),
    "noise on embeddings": Case(llama, {"neftune_noise_alpha": 5.0}),
    "16 bits in evaluation": Case(arguments={"bf16_full_eval": True}),
    "tokens counted": Case(arguments={"include_num_input_tokens_seen": True}),
    "adapters, accumulated, resumed": Case(lora, {**_SAVE, "gradient_accumulation_steps": 2, "bf16": True}, resume=2),
    "fifty steps": Case(arguments={"max_steps": 50}),
    "fifty steps, adapters": Case(lora, {"max_steps": 50}),
    "fifty steps, accumulated": Case(arguments={"max_steps": 50, "gradient_accumulation_steps": 4}),
    "fifty steps, resumed in the middle": Case(
        llama, {"max_steps": 50, "save_strategy": "steps", "save_steps": 25}, resume=25
    ),
}
"""Many more like them."""


@dataclass
class Outcome:
    """What a training leaves behind."""

    logs: list[dict[str, Any]]
    state: dict[str, torch.Tensor]
    evaluated: float
    predicted: torch.Tensor
    random: torch.Tensor

    def assert_equal(self, other: Outcome) -> None:
        """Everything is the same, to the last bit."""
        assert self.logs == other.logs
        assert self.state.keys() == other.state.keys()
        assert [name for name in self.state if not torch.equal(self.state[name], other.state[name])] == []
        assert self.evaluated == other.evaluated
        assert torch.equal(self.predicted, other.predicted)
        assert torch.equal(self.random, other.random)


def outcome(case: Case, way: str, folder: Path) -> Outcome:
    """Train in one of three ways: ``plain``, ``drop-in`` or ``whole step``."""
    trainer = _made(case, way, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
        if case.resume:
            trainer = _made(case, way, folder)
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{case.resume}"))
        after = torch.get_rng_state()
        evaluated = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(case.data).predictions
    if way == "drop-in":
        model = trainer.accelerator.unwrap_model(trainer.model)
        base = model.get_base_model() if case.model is lora else model
        assert {record.name for record in (model if hasattr(model, "records") else base).records} == {"recompute"}
    timed = ("runtime", "per_second", "total_flos")
    logs = [{key: value for key, value in log.items() if not key.endswith(timed)} for log in trainer.state.log_history]
    return Outcome(
        logs,
        {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()},
        evaluated,
        torch.as_tensor(predicted[0] if isinstance(predicted, tuple) else predicted),
        after,
    )


def _made(case: Case, way: str, folder: Path) -> Any:
    model = case.model()
    arguments = {
        "max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "use_cpu": True,
    } | dict(case.arguments)  # fmt: skip
    given = dict(case.trainer)
    patience = given.pop("patience", None)
    callbacks = [transformers.EarlyStoppingCallback(patience)] if patience else []
    passes = [Recompute("auto")]
    make: Any = transformers.Trainer
    if way == "drop-in":
        model = graphopt.optimize(model, passes)
    elif way == "whole step":
        make = functools.partial(WholeStepTrainer, passes=passes)
    return make(
        model=model, args=transformers.TrainingArguments(str(folder), **copy.deepcopy(arguments)),
        train_dataset=case.data, eval_dataset=case.data, callbacks=callbacks, **given,
    )  # fmt: skip


@functools.cache
def plain_outcome(name: str, folder: Path) -> Outcome:
    """What a case leaves behind without graphopt, trained once for all tests that compare with it."""
    return outcome({**CASES, **SIBLINGS}[name], "plain", folder)
