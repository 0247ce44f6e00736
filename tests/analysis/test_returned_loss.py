"""Peaks of loops that differentiate the loss which a model returns, and nothing else of it: to the byte."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import graphopt
from graphopt.analysis.returned_loss import of_loops
from graphopt.passes import FitMemory, Recompute
from graphopt.report.text.memory_table import memory_json, memory_text

TOKENS = torch.arange(4 * 32).view(4, 32) % 250 + 3


class Net(nn.Module):
    """Returns its loss and what it is of, as the models of ``transformers`` do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.head = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.inner(self.words(tokens))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


def measured(model: Any, call: Any) -> tuple[int, int]:
    """Peaks where the caller keeps the results, and where it does not."""

    def kept() -> None:
        result = call()
        result["loss"].backward()
        model.zero_grad(set_to_none=True)

    def dropped() -> None:
        call()["loss"].backward()
        model.zero_grad(set_to_none=True)

    for run in (kept, dropped):
        run()
    found = [graphopt.measure_peak(run).allocated_peak_bytes for run in (kept, dropped)]
    return found[0], found[1]


def predicted(model: Any) -> tuple[int, int]:
    memory = model.program.memory()
    kept, dropped = (size - memory.resident_bytes for size in memory.loops.values())
    return kept, dropped


PASSES = {"none": [], "recompute": [Recompute("inner")], "fit": [FitMemory("96%")]}


@pytest.mark.parametrize("passes", PASSES)
def test_peaks_of_both_loops_are_exact(passes: str) -> None:
    model: Any = graphopt.optimize(Net(), PASSES[passes])
    found = measured(model, lambda: model(TOKENS))
    assert predicted(model) == found
    assert model.program.memory().allocated_peak_bytes >= found[0] > found[1]


def test_the_peak_is_that_of_a_loop_that_differentiates_everything() -> None:
    model: Any = graphopt.optimize(Net())

    def run() -> None:
        result = model(TOKENS)
        gradient = torch.ones_like(result["logits"])
        torch.autograd.backward([result["loss"], result["logits"]], [None, gradient])
        model.zero_grad(set_to_none=True)

    run()
    peak = graphopt.measure_peak(run).allocated_peak_bytes
    loss = model(TOKENS)["loss"]
    assert peak <= model.program.memory().allocated_peak_bytes + loss.nbytes


def test_where_no_loss_is_among_the_results_there_is_one_peak() -> None:
    for model, given in (
        (nn.Linear(8, 8), torch.ones(4, 8)),
        (nn.MultiheadAttention(8, 2), (torch.ones(4, 2, 8),) * 3),
    ):
        optimized: Any = graphopt.optimize(model)
        optimized(*given) if isinstance(given, tuple) else optimized(given)
        assert not optimized.program.memory().loops
        assert of_loops(optimized.program.memory()) == ""


def test_a_whole_step_has_one_peak() -> None:
    model = Net()
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: m(x)["loss"])
    step(TOKENS)
    assert not step.program.memory().loops


def test_records_tables_and_the_log_say_which_bytes(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = graphopt.optimize(Net(), [FitMemory("96%")])
    with caplog.at_level(logging.INFO, "graphopt"):
        model(TOKENS)
    text = "\n".join(model.records[0].changed.lines)
    assert "131.1 kB that the model returns, and 131.1 kB of gradients for results beside the loss" in text
    assert "out = model(...); out.loss.backward()" in memory_text(model.program)
    assert list(memory_json(model.program)["loops"].values()) == list(model.program.memory().loops.values())
    assert any("where its loss alone is differentiated" in text for text in caplog.messages)


def _small(config: Any, **more: Any) -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1}
    return config(**{**sizes, "pad_token_id": 2, **more})


ATTENTION = {"num_attention_heads": 4, "intermediate_size": 128}
HEADS = {**ATTENTION, "num_key_value_heads": 2, "use_cache": False}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
SCANS = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(_small(transformers.LlamaConfig, **HEADS)),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeForCausalLM(_small(transformers.Qwen3MoeConfig, **HEADS, **EXPERTS)),
    "Mamba2": lambda: transformers.Mamba2ForCausalLM(_small(transformers.Mamba2Config, **SCANS)),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=64, use_cache=False)
    ),
    "megatron-bert": lambda: transformers.MegatronBertForMaskedLM(
        _small(transformers.MegatronBertConfig, **ATTENTION, max_position_embeddings=64)
    ),
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.sweep) for name in MODELS if name != "mpt"), "mpt"]
)
def test_models_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    model: Any = graphopt.optimize(MODELS[name]().train())
    found = measured(model, lambda: model(input_ids=TOKENS, labels=TOKENS))
    assert predicted(model) == found
