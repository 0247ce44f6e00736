"""What newcomers type by mistake, and that each error says what is wrong, where, and what to write."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import (
    Changed,
    Format,
    FxPass,
    GraphoptError,
    Pass,
    Phase,
    Pipeline,
    Program,
    RandomStreams,
    capture,
    configs,
    optimize,
    optimize_step,
    planning,
)
from graphopt.ir.node import OutputSpec
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
from graphopt.rewriting.memory.fit.budget import BudgetError
from tests.support.errors import told
from tests.support.training import Blocks, Net, mean_square

X, Y = torch.linspace(-1, 1, 8).reshape(2, 4), torch.zeros(2, 4)
NET = Net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
OTHER = Net(nn.Linear(4, 4))
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
DECAY = torch.optim.lr_scheduler.ConstantLR(SGD)


@functools.cache
def program() -> Program:
    return capture(NET, X)


@functools.cache
def program_of_tokens() -> Program:
    return capture(Blocks(layers=2), (torch.zeros(1, 4, dtype=torch.long),))


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
    ("a number as a pattern", lambda: program().find(3), ("name of a tensor is text", "3 (int)")),  # type: ignore[arg-type]
    ("a format that there is not", lambda: program().to("jsn"), ("jsn", "json")),
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
    ("accumulate a sum of", lambda: step().accumulate(4, mean="sum"), ("mean", "False for the sum", "'sum' (str)")),
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

STEP = optimize_step(NET, SGD, loss=squared)
STATE = STEP.state_dict()
READ, MADE = planning.Operation((), (0,), 1.0), planning.Operation((0,), (), 1.0)
PROBLEM = planning.Problem((READ, MADE), (8,), boundary=1)

KEYWORDS: list[Case] = [
    ("pass=", lambda: optimize(NET, **{"pass": "offload"}), ("no argument 'pass'", "did you mean 'passes'")),  # type: ignore[arg-type]
    ("criterion=", lambda: optimize_step(NET, SGD, criterion=F.mse_loss), ("'criterion'", "did you mean 'loss'")),  # type: ignore[call-arg]
    ("opt=", lambda: capture(NET, X, opt=SGD), ("no argument 'opt'", "did you mean 'optimizer'")),  # type: ignore[call-arg]
    ("dynamic=", lambda: optimize(NET, dynamic=True), ("no argument 'dynamic'", "'dynamic_shapes'")),  # type: ignore[call-arg]
    ("criterion= again", lambda: graphopt.largest_batch(NET, (X,), budget=1, criterion=1), ("did you mean 'loss'",)),  # type: ignore[call-arg]
    ("zzz=", lambda: optimize(NET, zzz=1), ("no argument 'zzz'", "it takes model, passes")),  # type: ignore[call-arg]
]  # fmt: skip

STATES: list[Case] = [
    ("a file's name", lambda: STEP.load_state_dict("step.pt"), ("'step.pt'", "torch.load(path)")),  # type: ignore[arg-type]
    ("nothing", lambda: STEP.load_state_dict(None), ("TrainStep.state_dict()", "None")),  # type: ignore[arg-type]
    ("a model's state", lambda: STEP.load_state_dict(NET.state_dict()), ("no state of a TrainStep", "version")),
    ("held", lambda: STEP.load_state_dict({**STATE, "held": 3}), ("'held'", "tensors by name", "3 (int)")),
    ("steps", lambda: STEP.load_state_dict({**STATE, "steps": "x"}), ("'steps'", "whole number", "'x'")),
    ("accumulate", lambda: STEP.load_state_dict({**STATE, "accumulate": 0}), ("'accumulate'", "at least 1")),
    ("mean", lambda: STEP.load_state_dict({**STATE, "mean": 1}), ("'mean'", "True or False", "1 (int)")),
    ("a gradient", lambda: STEP.load_state_dict({**STATE, "gradients": {"net.0.weight": 3}}), ("net.0.weight",)),
    ("redistribute one", lambda: graphopt.redistribute(STATE, 2), ("every rank", "[state]")),  # type: ignore[arg-type]
    ("redistribute none", lambda: graphopt.redistribute([], 2), ("every rank", "none")),
    ("redistribute numbers", lambda: graphopt.redistribute([3], 2), ("TrainStep.state_dict()", "3 (int)")),  # type: ignore[list-item]
    ("redistribute to a text", lambda: graphopt.redistribute([STATE], "2"), ("ranks", "'2' (str)")),  # type: ignore[arg-type]
    ("redistribute to a half", lambda: graphopt.redistribute([STATE], 2.5), ("whole number of ranks", "2.5")),  # type: ignore[arg-type]
    ("consolidate one", lambda: graphopt.sharded_state.consolidate({}, []), ("every rank", "[state]")),  # type: ignore[arg-type]
    ("consolidate a text", lambda: graphopt.sharded_state.consolidate(["a"], []), ("states[0]", "torch.load")),  # type: ignore[list-item]
    ("consolidate with a tensor", lambda: graphopt.sharded_state.consolidate([{"state": {}}], X), ("[parameter]",)),
    ("split for no rank", lambda: graphopt.sharded_state.split({"state": {}}, 2, 2), ("no rank 2 of 2",)),
    ("split what is none", lambda: graphopt.sharded_state.split({}, 0, 2), ("key 'state'",)),
    ("streams of a text", lambda: RandomStreams().load_state_dict("rng.pt"), ("RandomStreams.state_dict()", "load")),  # type: ignore[arg-type]
    ("a stream's name", lambda: RandomStreams().add(1, 2), ("name is text", "1 (int)")),  # type: ignore[arg-type]
    ("a stream's seed", lambda: RandomStreams().add("a", "2"), ("whole number", "manual_seed", "'2'")),  # type: ignore[arg-type]
    ("a rank of a stream", lambda: RandomStreams.model_parallel(1, "0"), ("rank", "'0' (str)")),  # type: ignore[arg-type]
    ("a state of a scaler", lambda: graphopt.scaler(optimize(NET, ScaleLoss())).load_state_dict(3), ("state_dict()",)),  # type: ignore[arg-type]
    ("a scaler of a plain model", lambda: graphopt.scaler(NET), ("a Net that is none", "graphopt.optimize")),
    ("a scaler of a list", lambda: graphopt.scaler([NET]), ("one by one", "scaler(*models)")),  # type: ignore[arg-type]
    ("a step without its maker", lambda: graphopt.TrainStep(NET, SGD, []), ("graphopt.optimize_step",)),  # type: ignore[arg-type]
    ("evaluating too little", lambda: STEP.evaluate(X), ("takes (model", "'y'", "loss(model, *batch)")),
]  # fmt: skip

PROGRAMS: list[Case] = [
    ("a call that has run", lambda: graphopt.measure_peak(3), ("3 (int)", "measure_peak(lambda: ...)")),  # type: ignore[arg-type]
    ("a device", lambda: graphopt.measure_peak(print, device="gpu"), ("'gpu'", "did you mean 'cuda'")),
    ("a device's number", lambda: graphopt.fast_dtype(0), ("a device", "write 'cuda:0'")),  # type: ignore[arg-type]
    ("a role", lambda: program().inputs_of("params"), ("role='params'", "did you mean 'parameter'")),
    ("a role of outputs", lambda: program().outputs_of("gradients"), ("did you mean 'gradient'",)),
    ("a phase", lambda: list(program().phase_nodes("backwards")), ("did you mean 'backward'",)),  # type: ignore[arg-type]
    ("a diff with None", lambda: program().diff(None), ("another graphopt.Program", "None")),  # type: ignore[arg-type]
    ("a format's number", lambda: program().to(3), ("the name of one", "known formats: text")),  # type: ignore[arg-type]
    ("a device without its bytes", lambda: program().to_perfetto(cost="A100"), ("'A100'", "a100-40gb", "a100-80gb")),
    ("outputs", lambda: program().copy().set_outputs(3, []), ("set_outputs", "3 (int)")),  # type: ignore[arg-type]
    ("descriptions", lambda: program().copy().set_outputs([1], ["loss"]), ("OutputSpec(role, target)", "'loss'")),  # type: ignore[list-item]
    ("one too few", lambda: program().copy().set_outputs([], [OutputSpec("loss", "x")]), ("0 output values and 1",)),
    ("an input", lambda: program().copy().add_input("x", X, "input"), ("InputSpec(role, target)",)),  # type: ignore[arg-type]
    ("an op", lambda: program().insert("add", (), phase=Phase.FORWARD, origin="me"), ("torch.ops.aten.add",)),  # type: ignore[arg-type]
    ("a policy", lambda: program().set_policy([], "keep"), ("graphopt.Policy", "'keep'")),  # type: ignore[arg-type]
    ("a node alone", lambda: program().set_policy(program().nodes[0], graphopt.Policy.MUST_SAVE), ("[node]",)),  # type: ignore[arg-type]
    ("no program to run on", lambda: Pipeline("offload").run(NET), ("a graphopt.Program", "capture(model, args)")),  # type: ignore[arg-type]
    ("a stage of a function", lambda: FxPass(print, stage="forwards"), ("did you mean 'forward'",)),  # type: ignore[arg-type]
    ("numerics of a function", lambda: FxPass(print, numerics="exact"), ("'bitwise'", "'tolerant'")),  # type: ignore[arg-type]
    ("counts of a pass", lambda: Changed(3), ("counts", "{'recomputed': 4}", "3 (int)")),  # type: ignore[arg-type]
    ("a line of a pass", lambda: Changed({"a": 1}, lines="one"), ("lines", "tuple of texts", "'one'")),  # type: ignore[arg-type]
    ("a format's function", lambda: Format("x", ".x", 3, ""), ("write(program, **options)", "3 (int)")),  # type: ignore[arg-type]
    ("a format's name", lambda: Format(3, ".x", print, ""), ("name is text",)),  # type: ignore[arg-type]
    ("a format that is none", lambda: graphopt.register_format(Format), ("class Format", "graphopt.Format")),  # type: ignore[arg-type]
    ("another one of the name", lambda: graphopt.register_format(Format("json", ".x", print, "")), ("'json' already",)),  # type: ignore[arg-type]
    ("what offload costs", lambda: Offload(cost="a100-80gb"), ("'measured', 'roofline'",)),
    ("a device nobody knows", lambda: FitMemory("8GB", cost="TPU v5"), ("'TPU v5'", "write 'measured'", "h200")),
    ("a device's long name", lambda: FitMemory("8GB", cost="NVIDIA A100-SXM4-80GB"), ("did you mean 'a100-80gb'?",)),
    ("the device here", lambda: FitMemory("8GB", cost="cuda"), ("'measured', 'roofline'",)),
]  # fmt: skip

PLANNER: list[Case] = [
    ("no problem", lambda: planning.plan(3, 8), ("planning.Problem", "3 (int)")),  # type: ignore[arg-type]
    ("a budget as text", lambda: planning.plan(PROBLEM, "8GB"), ("budget", "'8GB'", "8 * 10**9")),  # type: ignore[arg-type]
    ("a negative budget", lambda: planning.plan(PROBLEM, -1), ("budget", "at least 0", "-1")),
    ("no number", lambda: planning.plan(PROBLEM, float("nan")), ("budget", "nan")),  # type: ignore[arg-type]
    ("too little", lambda: planning.plan(PROBLEM, 1), ("no plan fits into 1 bytes", "smallest one found takes 8")),
    ("a limit", lambda: planning.find_frontier(PROBLEM, time_limit="1s"), ("number of seconds", "'1s'")),  # type: ignore[arg-type]
    ("progress", lambda: planning.find_frontier(PROBLEM, progress=True), ("progress(share, frontier)",)),  # type: ignore[arg-type]
    ("one index", lambda: planning.Operation(0, (), 1.0), ("tuple of indices", "write (0,)")),  # type: ignore[arg-type]
    ("a list", lambda: planning.Operation([0], (), 1.0), ("reads", "tuple", "[0] (list)")),  # type: ignore[arg-type]
    ("negative seconds", lambda: planning.Operation((), (), -1.0), ("seconds of at least 0", "-1.0")),
    ("seconds as text", lambda: planning.Operation((), (), "1"), ("number of seconds", "'1' (str)")),  # type: ignore[arg-type]
    ("bytes as text", lambda: planning.Problem((READ, MADE), ("8MB",)), ("sizes[0]", "'8MB'")),  # type: ignore[arg-type]
    ("negative bytes", lambda: planning.Problem((READ, MADE), (-8,)), ("sizes[0]", "at least 0", "-8")),
    ("numbers as operations", lambda: planning.Problem((3,), (8,)), ("operations[0]", "Operation(reads, makes, sec")),  # type: ignore[arg-type]
    ("missing sizes", lambda: planning.Problem((READ, MADE), ()), ("0 sizes", "1 values")),
    ("a place", lambda: planning.Problem((READ, MADE), (8,), boundary="1"), ("boundary", "'1' (str)")),  # type: ignore[arg-type]
    ("steps as a plan", lambda: planning.simulate(PROBLEM, (0, 1)), ("planning.Plan", "Plan(steps)")),  # type: ignore[arg-type]
]  # fmt: skip

CASES = [*API, *LOSSES, *OPTIMIZERS, *PASSES, *KEYWORDS, *STATES, *PROGRAMS, *PLANNER]


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
        program_of_tokens().find(pattern)
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
    assert failed.value.__cause__ is None, "its text is in the message"
    assert failed.value.__suppress_context__
    text = "".join(traceback.format_exception(failed.value))
    assert text.count("names no tensor") == 1
    assert "/graphopt/rewriting/" not in text
    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_a_cause_with_attributes_keeps_them_and_is_told_once() -> None:
    with pytest.raises(graphopt.PassError, match="searched") as caught:
        optimize(NET, FitMemory("300"))(X)
    assert isinstance(caught.value.__cause__, BudgetError)
    assert caught.value.__cause__.smallest_bytes > 300
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("what to do") == 1


@dataclass(frozen=True)
class Broken(Pass):
    """Fails in the user's own code."""

    name, stage, numerics = "broken", "joint", "bitwise"

    def apply(self, program: Program) -> Changed:
        return Changed({"halves": self.half(len(program.nodes))})

    def half(self, count: int) -> int:
        return count // 0


def test_a_traceback_shows_the_users_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of graphopt there is the line at which the error leaves, and what calls the user's pass; all where asked for."""

    def shown() -> list[str]:
        with pytest.raises(graphopt.PassError) as caught:
            optimize(NET, [Broken()], example_inputs=(X,))
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError)
        chain = (*traceback.extract_tb(caught.value.__traceback__), *traceback.extract_tb(cause.__traceback__))
        return [Path(frame.filename).name for frame in chain]

    here = Path(__file__).name
    assert shown() == [here, "errors.py", *["pipeline.py"] * 3, here, here]
    monkeypatch.setenv("GRAPHOPT_TRACEBACK", "full")
    full = shown()
    assert {"pipeline.py", "model_captures.py", "rewrite.py"} <= set(full)
    assert full[0] == full[-1] == here


@dataclass(frozen=True)
class Choosy(Pass):
    """Refuses in the words of graphopt, in the user's own code."""

    name, stage, numerics = "choosy", "joint", "bitwise"

    def apply(self, program: Program) -> Changed:
        raise GraphoptError(f"{program.title} is not to my taste")


def test_the_line_of_a_pass_that_refuses_is_kept() -> None:
    with pytest.raises(graphopt.PassError, match="not to my taste") as caught:
        optimize(NET, [Choosy()], example_inputs=(X,))
    text = "".join(traceback.format_exception(caught.value))
    assert "in apply" in text
    assert Path(__file__).name in text


class TasteError(GraphoptError):
    """The user's own, of graphopt's family, which takes two arguments."""

    def __init__(self, what: str, degree: int) -> None:
        super().__init__(what, degree)


@dataclass(frozen=True)
class Raises(Pass):
    """Raises what it is given, with notes and a cause."""

    name, stage, numerics = "raises", "joint", "bitwise"

    what: str = "own"

    def apply(self, program: Program) -> Changed:
        try:
            {}[self.what]
        except KeyError as missing:
            if self.what == "missing":
                raise
            kind = {"own": TasteError, "graphopt": GraphoptError}[self.what]
            error = kind("not to my taste", 3)
            error.add_note("seen by the user")
            raise error from missing
        raise AssertionError


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("own", r"'raises', failed: \('not to my taste', 3\)"),
        ("graphopt", r"'raises', failed: \('not to my taste', 3\)"),
        ("missing", "'raises', failed: KeyError: 'missing'"),
    ],
)
def test_what_a_users_pass_raises_stays_as_it_is(what: str, said: str) -> None:
    with pytest.raises(graphopt.PassError, match=said) as caught:
        optimize(NET, [Raises(what)], example_inputs=(X,))
    cause = caught.value.__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    assert [frame.name for frame in frames][-1] == "apply"
    assert frames[0].filename.endswith("pipeline.py"), "and nothing is cut off its traceback"
    if what != "missing":
        assert cause.args == ("not to my taste", 3)
        assert cause.__notes__ == ["seen by the user"]
        assert isinstance(cause.__cause__, KeyError)


def test_an_error_of_graphopts_family_that_a_loss_raises_is_not_touched() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            return model(x) + {}["nothing"]  # type: ignore[no-any-return]
        except KeyError as missing:
            raise TasteError("loss", 4) from missing

    step = optimize_step(NET, torch.optim.SGD(NET.parameters(), lr=0.1), loss=loss)
    with pytest.raises(TasteError) as caught:
        step(X)
    assert caught.value.args == ("loss", 4)
    assert isinstance(caught.value.__cause__, KeyError)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "loss"


QUIET = """
import torch, graphopt
from torch import nn
from graphopt.passes import FitMemory

class Jumpy(nn.Module):
    def forward(self, x):
        return x.sin() if x.sum() > 0 else x

class Outside(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.exp().detach().numpy())

class Misfit(nn.Module):
    def forward(self, x):
        return x @ torch.zeros(3, 3)

x = torch.ones(8, 4, requires_grad=True)
for model in (Jumpy(), Outside(), Misfit()):
    for loss in (None, lambda model, x: model(x).sum()):
        try:
            graphopt.capture(model, (x,), loss=loss)
        except graphopt.CaptureError as error:
            print(type(model).__name__, "is refused")
        except RuntimeError as error:
            assert str(error).startswith("mat1 and mat2 shapes cannot be multiplied"), error
            print("fails as in eager mode")
        else:
            raise AssertionError(model)
model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])
step = graphopt.optimize_step(
    model, torch.optim.SGD(model.parameters(), lr=0.1), [FitMemory("90%")], loss=lambda model, x: model(x).sum()
)
x = torch.ones(256, 4)
step(x)
graphopt.measure_peak(lambda: step(x))
with torch.profiler.profile() as profile:
    step(torch.ones(512, 4))
print(len(profile.events()) > 0)
try:
    with torch.profiler.profile():
        graphopt.measure_peak(lambda: None)
except graphopt.GraphoptError as error:
    print(error)
"""


def test_nothing_of_torch_reaches_stderr(tmp_path: Path) -> None:
    """Not the graphs that it prints above refusals, nor what its profiler says: also where the user runs a profiler."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
    environment.pop("KINETO_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is refused") == 4
    assert done.stdout.count("fails as in eager mode") == 2
    assert "True\nmemory is measured by torch's profiler, which is running already" in done.stdout
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("graphopt: ")] == []
    assert sum("a profiler of torch is running" in line for line in lines) == 1
