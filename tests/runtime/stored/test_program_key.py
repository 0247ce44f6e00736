"""The key of a stored capture: what changes without a change of code, model, call or passes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from graphopt.passes import FitMemory
from tests.support.costs import TOY
from tests.support.paths import ROOT
from tests.support.running import X, network, sgd
from tests.support.storing import is_loaded, reasons, step_run, use_programs


def test_a_plan_by_a_profile_in_a_file_is_made_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_programs(tmp_path, monkeypatch)
    path = TOY.save(tmp_path / "mine.toml")
    passes = [FitMemory("6.1kB", cost=str(path))]
    step_run(network(), sgd, [(X,)], passes)
    assert is_loaded(step_run(network(), sgd, [(X,)], passes)[1])
    replace(TOY, overhead=2.0).save(path)
    assert not is_loaded(step_run(network(), sgd, [(X,)], passes)[1])


loss, a = object(), torch.Generator()
"""Global variables, as in a script, that are called like attributes of the model; neither can be compared."""


class Scripted(nn.Module):
    """Reads attributes that are called like global variables."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.loss = nn.Linear(8, 8), nn.MSELoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.a(x), x)


def test_a_global_variable_called_like_an_attribute_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    step_run(Scripted(), sgd, [(X,)], loss=lambda model, x: model(x))
    assert reasons(folder) == ""
    assert is_loaded(step_run(Scripted(), sgd, [(X,)], loss=lambda model, x: model(x))[1])


class Shared(nn.Linear):
    """Has a callable among its class's attributes."""

    scale = functools.partial(torch.mul, other=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return type(self).scale(super().forward(x))


def test_a_callable_in_a_class_counts_by_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    step_run(Shared(8, 8), sgd, [(X,)])
    assert reasons(folder) == ""
    assert is_loaded(step_run(Shared(8, 8), sgd, [(X,)])[1])
    monkeypatch.setattr(Shared, "scale", functools.partial(torch.mul, other=2.0))
    assert not is_loaded(step_run(Shared(8, 8), sgd, [(X,)])[1])


def test_a_capture_whose_code_finds_variables_by_texts_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    step_run(network(), sgd, [(X,)], loss=lambda model, x: model(x).sum() * globals()["FACTOR"])
    assert "finds by a text (globals)" in reasons(folder)


FACTOR = 1.0

OF_TRANSFORMERS = """
import json, sys
import torch, transformers
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.stored.program_key import Subject, program_key

def keys():
    small = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    small |= {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    for name in ("GPT2LMHeadModel", "BertForSequenceClassification", "LlamaForCausalLM", "T5ForConditionalGeneration"):
        cls = getattr(transformers, name)
        model = cls(cls.config_class(**small))
        optimizer = torch.optim.AdamW(model.parameters())
        call = (), {"input_ids": torch.ones(2, 8, dtype=torch.long)}
        yield program_key(Subject(model, True, optimizer, call, Pipeline(""), "step", "eager", True)).sections

print(json.dumps(list(keys())))
"""


@pytest.mark.sweep
def test_models_of_transformers_have_the_same_key_in_each_process() -> None:
    """Their configurations note what ``hash`` gave of a text."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OF_TRANSFORMERS],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    first, second = (json.loads(process.communicate()[0]) for process in processes)
    assert len(first) == 4
    assert first == second
