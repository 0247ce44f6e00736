"""TRL's SFTTrainer with a drop-in model: as without graphopt, to the last bit."""

from __future__ import annotations

import contextlib
import io
import pydoc_data.topics
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trl import SFTConfig, SFTTrainer

import graphopt
from graphopt.passes import Recompute
from tests.support.loops import llama

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves


def tokenizer() -> Any:
    """The first words of the documentation, whatever else being one more."""
    words = " ".join(pydoc_data.topics.topics.values()).split()
    known = list(dict.fromkeys(["<pad>", "<end>", "<other>", *words]))[:64]
    vocabulary = {word: place for place, word in enumerate(known)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<other>"))
    made.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<other>"
    )


def train(way: str, folder: Path, steps: int, **options: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What is logged, and the parameters behind it."""
    text = pydoc_data.topics.topics["assert"].split()
    rows = datasets.Dataset.from_dict({"text": [" ".join(text[place : place + 16]) for place in range(24)]})
    model = llama()
    if options.pop("adapters", False):
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    if way == "drop-in":
        model = graphopt.optimize(model, [Recompute("auto")])
    arguments = SFTConfig(
        str(folder), max_steps=steps, per_device_train_batch_size=4, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True, bf16=False, **{"max_length": 16, **options},
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer())
        trainer.train()
    timed = ("runtime", "per_second", "total_flos")
    logs = [{key: value for key, value in log.items() if not key.endswith(timed)} for log in trainer.state.log_history]
    return logs, {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (4, {}),
        pytest.param(50, {}, marks=pytest.mark.sweep),
        pytest.param(50, {"gradient_accumulation_steps": 4}, marks=pytest.mark.sweep),
        pytest.param(50, {"adapters": True, "packing": True}, marks=pytest.mark.sweep),
        pytest.param(50, {"padding_free": True, "max_length": None}, marks=pytest.mark.sweep),
    ],
)
def test_a_tuning_is_as_without_graphopt(steps: int, options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = (train(way, tmp_path / way, steps, **options) for way in ("plain", "drop-in"))
    assert ours[0] == plain[0]
    assert len(ours[0]) >= steps
    assert ours[1].keys() == plain[1].keys()
    assert [name for name in plain[1] if not torch.equal(ours[1][name], plain[1][name])] == []
