"""What newcomers type by mistake, and that each error says what is wrong, where, and what to write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import FxPass, GraphoptError, Pipeline, capture, configs, optimize, optimize_step
from graphopt.passes import (
    ClipGradients,
    DataParallel,
    FitMemory,
    LocalSGD,
    MixedPrecision,
    Offload,
    Recompute,
    RecomputeEvenly,
    ScaleLoss,
)
from tests.support.errors import told
from tests.support.training import Blocks, Net, mean_square

X, Y = torch.linspace(-1, 1, 8).reshape(2, 4), torch.zeros(2, 4)
NET = Net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
OTHER = Net(nn.Linear(4, 4))
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
DECAY = torch.optim.lr_scheduler.ConstantLR(SGD)
PROGRAM = capture(NET, X)
TOKENS = capture(Blocks(layers=2), (torch.zeros(1, 4, dtype=torch.long),))


def squared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def step(*args: Any, **options: Any) -> Any:
    return optimize_step(NET, SGD, *args, **{"loss": squared, **options})


Case = tuple[str, Callable[[], Any], tuple[str, ...]]

API: list[Case] = [
    ("a class as the model", lambda: optimize(nn.Linear), ("nn.Module", "class Linear", "call it")),  # type: ignore[type-var]
    ("a function as the model", lambda: optimize(F.relu), ("nn.Module", "function relu", "forward of a module")),  # type: ignore[type-var]
    ("None as the model", lambda: optimize(None), ("nn.Module", "None")),  # type: ignore[type-var]
    ("model and optimizer swapped", lambda: optimize_step(SGD, NET), ("model comes first",)),  # type: ignore[arg-type]
    ("capture of a class", lambda: capture(nn.Linear, X), ("class Linear", "call it")),  # type: ignore[arg-type]
    ("a number as passes", lambda: optimize(NET, 3), ("list of passes", "3 (int)", "recompute{")),  # type: ignore[arg-type]
    ("a dict as passes", lambda: optimize(NET, {"recompute": 1}), ("list of passes", "dict")),  # type: ignore[arg-type]
    ("a function as passes", lambda: optimize(NET, print), ("function print", "FxPass")),  # type: ignore[arg-type]
    ("a class among the passes", lambda: optimize(NET, [Recompute]), ("$.passes[0]", "Recompute(...)")),  # type: ignore[list-item]
    ("a class alone", lambda: optimize(NET, Recompute), ("Recompute is a class", "Recompute(...)")),  # type: ignore[arg-type]
    ("a module among the passes", lambda: optimize(NET, [NET]), ("$.passes[0]", "is not a pass")),  # type: ignore[list-item]
    ("a pass twice", lambda: optimize(NET, ["offload", Offload()]), ("'offload' is given twice", "give it once")),
    ("a step pass in a drop-in model", lambda: optimize(NET, ClipGradients(1.0)), ("clip-gradients", "optimize_step")),
    ("dynamic_shapes=True", lambda: step(dynamic_shapes=True), ("dynamic_shapes", "True", "torch.export.Dim")),
    ("a text as dynamic_shapes", lambda: step(dynamic_shapes="batch"), ("dict by argument name", "Dim")),
    ("a text as a size", lambda: step(dynamic_shapes={"x": {0: "rows"}}), ("'rows'", "torch.export.Dim('rows')")),
    ("an unknown check", lambda: step(verify="numeric"), ("verify", "did you mean 'numerics'", "structure")),
    ("None as verify", lambda: step(verify=None), ("verify=None", "structure")),
    ("an unknown backend", lambda: step(backend="inducter"), ("no backend 'inducter'", "'inductor'")),
    ("a dict as example_inputs", lambda: optimize(NET, example_inputs={"x": X}), ("tuple", "positional", "dict")),  # type: ignore[arg-type]
    ("a stage that there is not", lambda: capture(NET, X, stage="forwards"), ("stage", "did you mean 'forward'")),  # type: ignore[arg-type]
    ("the step stage without an optimizer", lambda: capture(NET, X, stage="step"), ("update", "optimizer=")),
    ("a dict as args", lambda: capture(NET, {"x": X}), ("args", "tuple", "kwargs=")),  # type: ignore[arg-type]
    ("a number as args", lambda: capture(NET, 3), ("args", "3 (int)", "capture(model, (x,))")),  # type: ignore[arg-type]
    ("one argument too many", lambda: capture(NET, (X, Y)), ("Net.forward takes (x", "2 values", "as the model")),
    ("one argument too few", lambda: capture(NET), ("Net.forward takes (x", "0 values", "'x'")),
    ("an unknown keyword", lambda: capture(NET, (X,), {"mask": Y}), ("Net.forward", "mask")),
    ("a name of another type", lambda: graphopt.name(X, 3), ("name of a tensor", "3 (int)", "res2a")),  # type: ignore[arg-type]
    ("name without a tensor", lambda: graphopt.name("res2a", X), ("a tensor", "name(tensor")),  # type: ignore[arg-type]
    ("a name with a star", lambda: graphopt.name(X, "a*"), ("'a*'", "glob characters")),
    ("a number as a pattern", lambda: PROGRAM.find(3), ("name of a tensor is text", "3 (int)")),  # type: ignore[arg-type]
    ("a format that there is not", lambda: PROGRAM.to("jsn"), ("jsn", "json")),
    ("a function that is none", lambda: FxPass(3), ("FxPass", "3")),  # type: ignore[arg-type]
]  # fmt: skip

LOSSES: list[Case] = [
    ("a loss's name", lambda: step(loss="mse"), ("loss(model, *batch)", "'mse'", "F.mse_loss(model(x), y)")),
    ("another loss's name", lambda: step(loss="CrossEntropy"), ("loss=lambda model, x, y: F.cross_entropy",)),
    ("a criterion", lambda: step(loss=nn.CrossEntropyLoss()), ("does not run the model", "criterion(model(x), y)")),
    ("a criterion's class", lambda: step(loss=nn.MSELoss), ("class MSELoss", "MSELoss()", "model(x), y")),
    ("a function of two tensors", lambda: step(loss=F.mse_loss), ("does not run the model", "F.mse_loss(model(x), y)")),
    ("a built-in function", lambda: step(loss=F.cross_entropy), ("F.cross_entropy(model(x), y)",)),
    ("a tensor", lambda: step(loss=X.sum()), ("loss(model, *batch)", "Tensor", "lambda")),
    ("False", lambda: step(loss=False), ("loss", "False", "True")),
    ("the model", lambda: step(loss=NET), ("leave it out", "itself")),
    ("forgotten", lambda: step(loss=None)(X, Y), ("Net.forward takes (x", "2 values", "give loss=lambda model, x, y")),
    ("without the model", lambda: step(loss=lambda x, y: x)(X, Y), ("takes (x, y)", "gets the model first")),
    ("a batch in a list", lambda: step()([X, Y]), ("takes (model", "step(*batch)")),
    ("a missing part of the batch", lambda: step()(X), ("takes (model", "1 value", "'y'", "loss(model, *batch)")),
    ("an unknown keyword", lambda: step()(X, target=Y), ("target", "takes (model")),
    ("sizes of an unknown argument", lambda: step(dynamic_shapes={"z": {}})(X, Y), ("'z'", "arguments x, y")),
    ("sizes of too few", lambda: step(dynamic_shapes=({},))(X, Y), ("1 entries for 2", "'x': ..., 'y': ...")),
    ("accumulate nothing", lambda: step().accumulate(0), ("accumulate", "at least 1", "0 (int)")),
    ("accumulate a text", lambda: step().accumulate("4"), ("accumulate", "'4' (str)")),
    ("looking too early", lambda: step().program, ("nothing is captured yet", "step.prepare(*batch)")),
    ("looking at a model too early", lambda: optimize(NET).program, ("nothing is captured yet", "example_inputs=")),
]  # fmt: skip

OPTIMIZERS: list[Case] = [
    ("a text", lambda: optimize_step(NET, "adam"), ("'adam'", "torch.optim.Adam(model.parameters()")),  # type: ignore[arg-type]
    ("a class", lambda: optimize_step(NET, torch.optim.SGD), ("class SGD", "torch.optim.SGD(model.")),  # type: ignore[arg-type]
    ("a scheduler", lambda: optimize_step(NET, DECAY), ("ConstantLR", ".optimizer")),  # type: ignore[arg-type]
    ("parameters", lambda: optimize_step(NET, NET.parameters()), ("torch.optim.AdamW(model.parameters()",)),  # type: ignore[arg-type]
    ("several", lambda: optimize_step(NET, [SGD, SGD]), ("a step has one", "groups")),  # type: ignore[arg-type]
    ("passes", lambda: optimize_step(NET, [Recompute("a")]), ("passes come third",)),  # type: ignore[arg-type]
    ("None", lambda: optimize_step(NET, None), ("torch.optim optimizer over model.parameters()", "None")),  # type: ignore[arg-type]
    ("of another model", lambda: optimize_step(OTHER, SGD, loss=squared), ("none of the parameters", "model.param")),
    ("of another model in capture", lambda: capture(OTHER, X, optimizer=SGD), ("none of the parameters of this Net",)),
]  # fmt: skip

PASSES: list[Case] = [
    ("no budget", lambda: FitMemory(), ("FitMemory needs budget", "FitMemory(budget=...)")),  # type: ignore[call-arg]
    ("budget 0", lambda: FitMemory(0), ("budget=0", "8GB")),
    ("budget -5", lambda: FitMemory(-5), ("budget=-5", "60%")),
    ("budget 8", lambda: FitMemory(8), ("budget=8 ", "did you mean '8GB'")),
    ("budget 0.6", lambda: FitMemory(0.6), ("budget=0.6", "'60%'")),  # type: ignore[arg-type]
    ("budget nan", lambda: FitMemory(float("nan")), ("nan", "8GB")),  # type: ignore[arg-type]
    ("budget inf", lambda: FitMemory(float("inf")), ("inf", "8GB")),  # type: ignore[arg-type]
    ("budget 8G", lambda: FitMemory("8G"), ("'8G'", "did you mean 8GB")),
    ("budget 8 apples", lambda: FitMemory("8 apples"), ("8 apples", "8GB", "60%")),
    ("budget None", lambda: FitMemory(None), ("budget", "number of bytes", "None")),  # type: ignore[arg-type]
    ("cost A100", lambda: FitMemory("8GB", cost="A100"), ("'A100'", "a100-40gb", "a100-80gb")),
    ("allow", lambda: FitMemory("8GB", allow="recompte"), ("recompte", "did you mean 'recompute'")),  # type: ignore[arg-type]
    ("host budget", lambda: FitMemory("8GB", host_budget=-1), ("host_budget", "negative")),
    ("another option", lambda: FitMemory(budgt="8GB"), ("no option 'budgt'", "did you mean 'budget'")),  # type: ignore[call-arg]
    ("no checkpoints", lambda: Recompute(), ("Recompute needs checkpoints",)),  # type: ignore[call-arg]
    ("checkpoint=", lambda: Recompute(checkpoint="a"), ("'checkpoint'", "did you mean 'checkpoints'")),  # type: ignore[call-arg]
    ("a number as checkpoints", lambda: Recompute(3), ("checkpoints", "3 (int)")),  # type: ignore[arg-type]
    ("int8", lambda: MixedPrecision("int8"), ("dtype", "'int8'", "bfloat16", "float16")),
    ("O3", lambda: MixedPrecision(level="O3"), ("level", "'O3'", "'O1', 'O2'")),
    ("scale_loss", lambda: MixedPrecision(scale_loss="yes"), ("scale_loss", "True or False", "'yes'")),  # type: ignore[arg-type]
    ("bytes as text", lambda: Offload(min_bytes="1MB"), ("min_bytes", "'1MB'", "write 1000000")),  # type: ignore[arg-type]
    ("a tier", lambda: Offload(tier="dsk"), ("tier", "'dsk'", "did you mean 'disk'")),
    ("a number as text", lambda: LocalSGD("4"), ("k_steps", "whole number", "'4'", "write 4")),  # type: ignore[arg-type]
    ("a fraction", lambda: RecomputeEvenly(2.5), ("number", "whole number", "2.5")),  # type: ignore[arg-type]
    ("two values", lambda: ClipGradients(1, 2), ("ClipGradients takes 1", "max_norm, max_value")),  # type: ignore[misc]
    ("no limit", lambda: ClipGradients(), ("one limit", "max_norm", "max_value")),
    ("buckets as text", lambda: DataParallel(bucket_mb="25"), ("bucket_mb", "a number", "write 25")),  # type: ignore[arg-type]
    ("an unknown scale", lambda: ScaleLoss(init_sclae=2.0), ("init_sclae", "init_scale")),  # type: ignore[call-arg]
    ("a hopeless budget", lambda: optimize(NET, FitMemory("300"))(X), ("parameters", "searched", "what to do")),
]  # fmt: skip

TEXTS = [
    ("recompte{checkpoints=a}", ("no pass called 'recompte'", "did you mean 'recompute'")),
    ("amp", ("no pass called 'amp'", "'mixed-precision'")),
    ("checkpoint", ("'checkpoint'", "'recompute'")),
    ("zero", ("'zero'", "'shard-optimizer'")),
    ("something", ("'something'", "known passes")),
    ("Recompute", ("needs the option checkpoints", "recompute{checkpoints=...}")),
    ("Recompute(checkpoints=a)", ("options go in braces", "Recompute{option=value}", "^")),
    ("recompute=blocks.*", ("options go in braces", "^")),
    ("fit-memory{8GB}", ("expected option=value", "^")),
    ("fit-memory{budget=8 GB}", ("expected option=value", "quotes")),
    ("fit-memory{budget=0}", ("$.passes[0] (fit-memory)", "budget=0", "8GB")),
    ("fit-memory{budget=8GB,cost=roofline}", ("options are separated by spaces", "^")),
    ("recompute{Checkpoint=a}", ("no option 'Checkpoint'", "did you mean 'checkpoints'")),
    ("recompute{checkpoints=a};offload", ("expected a comma", "^")),
    ("offload{min-bytes=1MB}", ("$.passes[0] (offload).min-bytes", "'1MB' is not a whole number")),
    ("mixed-precision{dtype=int8}", ("(mixed-precision)", "'int8'", "'bfloat16'")),
]

NAMES = [
    ("layers.*", ("'layers.*' names no tensor", "did you mean 'blocks.*'", "graphopt tensors TARGET")),
    ("layers.*.mlp", ("did you mean 'blocks.*.mlp'",)),
    ("layers.1", ("did you mean 'blocks.1'",)),
    ("model.blocks.*", ("did you mean 'blocks.*'",)),
    ("transformer.h.*", ("did you mean 'blocks.*'",)),
    ("blocks[1]", ("did you mean 'blocks.1'",)),
    ("hed", ("did you mean 'head'",)),
]

CASES = [*API, *LOSSES, *OPTIMIZERS, *PASSES]


@pytest.mark.parametrize(("call", "parts"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_mistake_is_an_error_that_helps(call: Callable[[], Any], parts: tuple[str, ...]) -> None:
    with pytest.raises((GraphoptError, TypeError)) as caught:
        call()
    assert [part for part in parts if part not in told(caught.value)] == [], told(caught.value)


@pytest.mark.parametrize(("text", "parts"), TEXTS, ids=[text for text, _ in TEXTS])
def test_a_mistake_in_text_is_an_error_that_helps(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(graphopt.PipelineError) as caught:
        Pipeline(text)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(("pattern", "parts"), NAMES, ids=[pattern for pattern, _ in NAMES])
def test_a_name_of_no_tensor_gets_the_near_ones(pattern: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(GraphoptError) as caught:
        TOKENS.find(pattern)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (Recompute("a"), "recompute{checkpoints=a}"),
        (None, ""),
        (["recompute{checkpoints=a}"], "recompute{checkpoints=a}"),
        ("Recompute{checkpoints=a}", "recompute{checkpoints=a}"),
        ("fit_memory{budget=8GB}", "fit-memory{budget=8GB}"),
        ("FitMemory{budget=8e9}", 'fit-memory{budget="8e9"}'),
        ([FitMemory(8e9)], "fit-memory{budget=8000000000}"),  # type: ignore[arg-type]
        ([MixedPrecision("bf16")], "mixed-precision"),
        ([MixedPrecision("half")], "mixed-precision{dtype=float16}"),
        ([MixedPrecision(torch.float16)], "mixed-precision{dtype=float16}"),  # type: ignore[arg-type]
        ([MixedPrecision(deny=["softmax"])], "mixed-precision{deny=softmax}"),  # type: ignore[arg-type]
        ([Offload("a")], "offload{tensors=a}"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_ambiguous_is_accepted(given: Any, same: str) -> None:
    assert str(Pipeline(given)) == str(Pipeline(same))


def test_fields_that_are_not_honoured_are_named(caplog: pytest.LogCaptureFixture) -> None:
    strategy = {"recompute": True, "recompute_configs": {"checkpoints": ["a"]}, "lars": True, "asp": True}
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert configs.from_paddle(strategy) == [Recompute(("a",))]
    assert caplog.messages == [
        "lars is not honoured: it is an optimizer: give one to optimize_step",
        "asp is not honoured: weights are not pruned",
    ]


def test_an_error_is_told_once(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    class Jumpy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) if x.sum() > 0 else x

    model = Jumpy(nn.Linear(4, 4))
    with pytest.raises(graphopt.CaptureError, match="control flow depends on a tensor's values") as caught:
        optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)(X)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(graphopt.PassError, match="names no tensor") as failed:
        optimize(NET, Recompute("nothing"))(X)
    cause = failed.value.__cause__
    assert cause is not None
    assert cause.__traceback__ is None or cause.__traceback__.tb_next is None
    assert caplog.records == []
    assert capfd.readouterr().err == ""
