"""The examples in docstrings of integrations run."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers

from graphopt.integrations.accelerate import prepare_step
from graphopt.integrations.lightning import Optimize
from graphopt.integrations.transformers import Trainer
from tests.integrations.test_lightning_loops import Net, loader
from tests.support.docstring_examples import namespace
from tests.support.loops import Rows, gpt

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves


@pytest.mark.sweep(but=("Optimize",))
@pytest.mark.parametrize("public", [prepare_step, Optimize, Trainer], ids=lambda public: public.__name__)
def test_an_example_runs(public: Any, tmp_path: Path) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    names = namespace() | {
        "accelerate": accelerate, "lightning": lightning, "transformers": transformers, "folder": str(tmp_path),
        "language_model": gpt(), "rows": Rows(), "lightning_model": Net(), "batches": loader(),
        "quiet": {**quiet, "logger": False, "accelerator": "cpu"}, public.__name__: public,
    }  # fmt: skip
    found = [test for test in doctest.DocTestFinder(recurse=False).find(public, globs=names) if test.examples]
    assert len(found) == 1
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert torch.is_grad_enabled()
    printed: list[str] = []
    assert runner.run(found[0], out=printed.append).failed == 0, "".join(printed)
