"""Other releases of torch: a newer one is told in one line, and a name that is missing is an error that explains."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import graphopt
from graphopt import GraphoptError, PassError, TorchVersionError
from graphopt._torch import private_names
from graphopt._torch.versions import INSTALL, KNOWN
from graphopt.passes import DataParallel, MixedPrecision
from tests.support.paths import ROOT

FOLDER = ROOT / "graphopt" / "_torch"

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A new process that runs ``code`` after it has imported torch."""
    command = [sys.executable, "-c", f"import logging, sys, torch\n{code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


USE = "import graphopt; graphopt.capture(torch.nn.Linear(2, 2), (torch.ones(1, 2),))"
"""The first use of graphopt that needs private names: to import it, and its passes, needs none."""


def of_version(version: str) -> str:
    return f"torch.__version__ = {version!r}\n"


def message(name: str, feature: str, version: str = torch.__version__) -> list[str]:
    """The lines of the error about one missing name."""
    return [
        f"torch {version} lacks {name}, which graphopt needs for {feature}",
        f"  what to do: run `{INSTALL}`; graphopt is known to work with torch {KNOWN}",
    ]


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_newer_torch_is_told_in_one_line() -> None:
    done = run(of_version("2.99.1+cpu") + "import graphopt, graphopt.passes, graphopt.cli.main\nimport graphopt._torch")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line == (
        f"torch 2.99.1+cpu is newer than the releases that graphopt is known to work with, {KNOWN}: "
        f"where something fails, run `{INSTALL}`"
    )


@pytest.mark.sweep
def test_the_line_comes_from_graphopts_logger() -> None:
    done = run(
        of_version("2.99.1")
        + "logging.getLogger('graphopt').setLevel(logging.ERROR)\nimport graphopt; graphopt.optimize"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_installs_the_releases_that_are_known() -> None:
    first, last = KNOWN.split(" to ")
    major, minor = map(int, last.split("."))
    allowed = f"torch>={first},<{major}.{minor + 1}"
    assert f"pip install '{allowed}'" == INSTALL
    assert allowed in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


_ALSO_KNOWN = [
    pytest.param(version, marks=pytest.mark.sweep)
    for version in ("2.11.0", "2.12.1+cu130", "2.13.0", "2.14.0a0+git0a1b2c3")
]


@pytest.mark.sweep
@pytest.mark.parametrize("version", ["2.14.9", *_ALSO_KNOWN])
def test_a_known_torch_is_not_worth_a_line(version: str) -> None:
    done = run(of_version(version) + "import graphopt; graphopt.optimize")
    assert (done.returncode, done.stderr) == (0, "")


# --- names that are missing when graphopt is first used --------------------------------------------------------------

REMOVED = {
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors": (
        "import torch._functorch.aot_autograd as m; del m.aot_export_joint_with_descriptors",
        "forward and backward as one program",
    ),
    "torch._functorch._aot_autograd.descriptors.GradAOTOutput": (
        "import torch._functorch.aot_autograd, torch._functorch._aot_autograd.descriptors as m; del m.GradAOTOutput",
        "forward and backward as one program",
    ),
    "torch._prims.rng_prims": (
        "import torch.export, torch.distributed.tensor; sys.modules['torch._prims.rng_prims'] = None",
        "the same random numbers in what is recomputed",
    ),
    "torch._C._get_flash_sdp_enabled": (
        "del torch._C._get_flash_sdp_enabled",
        "noticing that something changed since a program was captured",
    ),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.bound_sympy": (
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv; del ShapeEnv.bound_sympy",
        "example values of tensors and of sizes",
    ),
}


_SWEPT = [pytest.param(name, marks=pytest.mark.sweep) for name in list(REMOVED)[1:]]


@pytest.mark.sweep
@pytest.mark.parametrize("name", [next(iter(REMOVED)), *_SWEPT])
def test_a_missing_name_is_an_error_when_graphopt_is_first_used(name: str) -> None:
    code, feature = REMOVED[name]
    done = run(f"{of_version('2.14.7')}{code}\n{USE}")
    assert done.returncode == 1
    first, last = done.stderr.splitlines()[-2:]
    assert [first.removeprefix("graphopt.errors.TorchVersionError: "), last] == message(name, feature, "2.14.7")


@pytest.mark.sweep
def test_all_missing_names_are_told_at_once() -> None:
    removed = "\n".join(code for code, _ in REMOVED.values())
    done = run(f"{removed}\ntry:\n    {USE}\nexcept ImportError as error:\n    print(error)")
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert sorted(told[:-1]) == sorted(message(name, feature)[0] for name, (_, feature) in REMOVED.items())
    assert told[-1] == message("", "")[-1]


def test_what_torch_itself_misses_is_not_called_missing_in_torch() -> None:
    done = run(f"sys.modules['sympy'] = None\n{USE}")
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of sympy halted")


# --- names that are missing when something is used -------------------------------------------------------------------


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def step(**options: object) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphopt.optimize_step(model, optimizer, loss=square, **options)(torch.ones(2, 4))  # type: ignore[arg-type]


def exchange() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        step(passes=[DataParallel()])
    finally:
        dist.destroy_process_group()


USES: dict[str, tuple[Callable[[], object], str]] = {
    "torch.utils.checkpoint.CheckpointFunction": (
        lambda: graphopt.capture(nn.Linear(4, 4), (torch.ones(2, 4),)),
        "recognising torch.utils.checkpoint in a model",
    ),
    "torch._inductor.compile_fx.compile_fx_inner": (lambda: step(backend="inductor"), 'the backend "inductor"'),
    "torch._inductor.custom_graph_pass.CustomPartitionerFn": (
        lambda: graphopt.partitioner("60%"),
        "a partitioner for the inductor of torch.compile",
    ),
    "torch._C._dispatch_get_all_op_names": (
        lambda: step(passes=[MixedPrecision(dtype="bfloat16")]),
        "the rules of autocast",
    ),
    "torch._C._profiler._EventType.Allocation": (
        lambda: graphopt.measure_peak(lambda: torch.ones(4)),
        "measuring memory on the CPU",
    ),
    "torch.distributed.distributed_c10d._get_default_store": (exchange, "process groups and their stores"),
}


@pytest.mark.sweep(cases=("torch._inductor.compile_fx.compile_fx_inner", "torch._C._dispatch_get_all_op_names"))
@pytest.mark.parametrize("name", list(USES))
def test_a_missing_name_is_an_error_where_it_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, feature = USES[name]
    monkeypatch.delattr(name)
    with pytest.raises(GraphoptError) as raised:
        use()
    error = raised.value.__cause__ if isinstance(raised.value, PassError) else raised.value
    assert isinstance(error, TorchVersionError)
    told = str(raised.value)
    assert told[told.index(message(name, feature)[0]) :].splitlines() == message(name, feature)


@pytest.mark.sweep
def test_other_features_work_where_a_name_of_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USES:
        if not name.startswith("torch.utils.checkpoint"):
            monkeypatch.delattr(name)
    step()


def test_a_module_that_is_missing_stands_for_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", None)
    with pytest.raises(TorchVersionError, match=r"lacks torch\._inductor\.compile_fx, which graphopt needs"):
        step(backend="inductor")


def test_attributes_of_objects_are_found_by_any_of_their_names() -> None:
    value = SimpleNamespace(inner=SimpleNamespace(old=1))
    assert private_names.attribute(value, "inner.new|old", private_names.VALUES) == 1
    value.inner.new = 2
    assert private_names.attribute(value, "inner.new|old", private_names.VALUES) == 2
    with pytest.raises(TorchVersionError, match=r"types\.SimpleNamespace\.a or b, which graphopt needs for example"):
        private_names.attribute(value, "inner.a|b.c", private_names.VALUES)


# --- the table -------------------------------------------------------------------------------------------------------


def needed() -> set[str]:
    """Every dotted name of the table."""
    return {
        f"{module}.{name}"
        for feature in (*private_names.ON_IMPORT, *private_names.ON_USE)
        for module, names in feature.names.items()
        for alternatives in names.split()
        for name in alternatives.split("|")
    }


def used(path: Path) -> set[str]:
    """Every name of torch's that a file imports, or reads through a name that it imports, with all its dots."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {"torch": "torch"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    pending: list[ast.AST] = [tree]
    while pending:
        node = current = pending.pop()
        parts: list[str] = []
        while isinstance(current, ast.Attribute):
            parts.append(current.attr)
            current = current.value
        if isinstance(current, ast.Name) and current.id in known:
            found.add(".".join([known[current.id], *reversed(parts)]))
        else:
            pending += ast.iter_child_nodes(node)
    return {name for name in found | set(known.values()) if name.split(".")[0] == "torch"}


def is_private(name: str) -> bool:
    inside = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    return inside or name.startswith("torch.fx.experimental.")


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    table = needed()
    modules = {module for f in (*private_names.ON_IMPORT, *private_names.ON_USE) for module in f.names}
    prefixes = {".".join(name.split(".")[:end]) for name in table | modules for end in range(1, name.count(".") + 2)}
    files = [path for path in FOLDER.rglob("*.py") if path.name != "private_names.py"]
    private = {name for path in files for name in used(path) if is_private(name)}
    assert len(private) > 50
    unlisted = {name for name in private if name not in prefixes and not any(name.startswith(f"{t}.") for t in table)}
    assert unlisted == set()


def test_every_name_in_the_table_is_used() -> None:
    files = [path for folder in ("graphopt", "passes") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path.name != "private_names.py")
    assert {name for name in needed() if name.removesuffix(".default").rsplit(".", 1)[-1] not in text} == set()


def test_the_installed_torch_has_every_name() -> None:
    private_names.require_all([*private_names.ON_IMPORT, *private_names.ON_USE])
