"""README.md as it stands: its Python runs, its commands work, its table is current; and CONTRIBUTING.md's example."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, final

import pytest
import torch

from graphopt import Changed, Pass, Phase, Pipeline, Program, Rewrite
from graphopt.cli import main as cli
from graphopt.errors import GraphoptError
from graphopt.ir.node import Stage
from graphopt.rewriting.pass_ import Numerics
from graphopt.rewriting.registry import available_passes
from tests.support import catalogue
from tests.support.command import Idle, Nothing
from tests.support.paths import ROOT
from tests.support.training import Blocks, captured, next_token, results

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language: str, text: str = TEXT) -> list[tuple[int, str]]:
    """The fenced blocks of a language: the line they start at, counted from 0, and their source."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of ``program`` in the blocks of shell commands."""
    lines = [line for _, block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.split()[:1] == [program]]


def test_python_blocks_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    found = blocks("python")
    assert found
    for line, source in found:
        exec(compile("\n" * line + source, str(README), "exec", dont_inherit=True), module.__dict__)
    printed = capsys.readouterr().out
    assert re.search(
        r"^recompute\{checkpoints=layers\.\*\}: \d+ recomputed, 4 checkpoints, .*; peak .* -> ", printed, re.M
    )
    assert re.search(r"^fold-transposes: [1-9]\d* folded; ", printed, re.M)
    assert re.search(r"^\{'0.up': addmm, 'hidden': gelu, '0::add': add, ", printed, re.M)


@pytest.fixture(scope="module")
def small_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with two blocks in the GPT, of fewer tokens; ``test_examples`` has it at its size."""
    folder = tmp_path_factory.mktemp("small") / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = (folder / "models.py").read_text(encoding="utf-8")
    small, changed = re.subn(r"^    (layers: int = 12|context: int = 256)$", _smaller, source, flags=re.MULTILINE)
    assert changed == 2
    (folder / "models.py").write_text(small, encoding="utf-8")
    return folder


def _smaller(match: re.Match[str]) -> str:
    return {"layers: int = 12": "    layers: int = 2", "context: int = 256": "    context: int = 64"}[match[1]]


def command_settings() -> list[Any]:
    """Every command; `make test` leaves out those that take the longest."""
    long = {"diff", "compare", "--after-each", "--format"}
    return [
        pytest.param(words, marks=pytest.mark.sweep if long.intersection(words) else (), id=" ".join(words))
        for words in commands("graphopt")
    ]


@pytest.mark.parametrize("arguments", command_settings())
def test_commands_work(
    arguments: list[str],
    small_examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").symlink_to(small_examples)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    try:
        assert cli.main(arguments) == 0
    finally:
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(small_examples)):
                del sys.modules[name]
    files = [tmp_path / arguments[index + 1] for index, word in enumerate(arguments[:-1]) if word == "-o"]
    assert all(file.stat().st_size for file in files)
    assert files or capsys.readouterr().out.strip()


def test_what_make_is_asked_for_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {words[0] for words in commands("make")} | set(re.findall(r"`make(?: [A-Z_]+=[^ `]*)* ([a-z]+)`", TEXT))
    assert asked >= {"demo", "test", "help", "install"}
    assert asked <= targets


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_passes_in_contributing_work() -> None:
    names = {"Changed": Changed, "ClassVar": ClassVar, "GraphoptError": GraphoptError, "Numerics": Numerics}
    names |= {"Pass": Pass, "Phase": Phase, "Program": Program, "Rewrite": Rewrite, "Stage": Stage}
    names |= {"aten": torch.ops.aten, "dataclass": dataclass, "final": final, "torch": torch}
    fold, scale = (source for _, source in blocks("python", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    exec(compile(fold + scale, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    assert len([line for line in fold.splitlines() if line.strip()]) < 10
    double = names["ScaleLoss"](factor=2.0)
    model, tokens = Blocks(layers=1, p=0.0), torch.randint(11, (2, 5))
    program = captured(model, tokens, loss=next_token)
    before, _ = results(program, model, tokens)
    records = Pipeline([double, names["FoldTransposes"]()]).run(program)
    assert records[0].changed.counts == {"scaled": 1}
    assert records[1].changed.counts["replaced"] > 1
    after, _ = results(program, model, tokens)
    assert {spec.role for spec in before} == {"loss", "gradient"}
    for spec, value in before.items():
        assert torch.equal(after[spec], value if spec.role == "loss" else 2 * value)
    assert not any(record.changed for record in Pipeline([double, names["FoldTransposes"]()]).run(program))
    assert not double.apply(program)
    with pytest.raises(GraphoptError, match="needs a program with a loss"):
        double.apply(captured(model, tokens, loss=None))


# --- the table of passes ---------------------------------------------------------------------------------------------


def test_the_table_of_passes_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert catalogue.main(["--check", str(README)]) == 0, capsys.readouterr().err


def test_every_built_in_pass_is_in_the_table() -> None:
    table = TEXT[TEXT.index(catalogue.START) : TEXT.index(catalogue.END)]
    own = [name for name, cls in available_passes().items() if cls.__module__.startswith("graphopt.passes.")]
    assert own
    assert re.findall(r"^\| `\w+` \| `([\w-]+)` \|", table, re.MULTILINE) == own


def test_a_table_shows_options_defaults_and_order() -> None:
    heading, rule, nothing, idle = catalogue.passes_table([Nothing, Idle]).splitlines()
    assert heading.count(" | ") == rule.count(" | ") == nothing.replace("\\|", "").count(" | ") == 5
    assert nothing.startswith("| `Nothing` | `nothing` | `budget`: `float \\| None`, default `None`<br>`names`: ")
    assert "`label`: `str`, default `''`" in nothing
    assert nothing.endswith(
        "Does nothing. Runs after `recompute`. Needs `first`. Not together with `other`, `third`. |"
    )
    assert " | none | " in idle


def test_a_stale_table_is_reported_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(TEXT.replace("| `Recompute` |", "| `Recomputed` |"), encoding="utf-8")
    assert catalogue.main(["--check", str(copy)]) == 1
    assert f"--write {copy}" in capsys.readouterr().err
    assert catalogue.main(["--write", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == TEXT


@pytest.mark.parametrize("text", ["no markers", f"{catalogue.END}{catalogue.START}", catalogue.START, TEXT + TEXT])
def test_wrong_markers_are_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(text, encoding="utf-8")
    assert catalogue.main(["--write", str(copy)]) == 2
    assert "each once and in this order" in capsys.readouterr().err
    assert copy.read_text(encoding="utf-8") == text


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalogue.main(["--check", str(tmp_path / "gone.md")]) == 2
    assert "gone.md" in capsys.readouterr().err


def test_the_border_in_contributing_is_that_of_the_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert catalogue.replace_table(text, catalogue.border_table(), "<!-- border -->", "<!-- /border -->") == text
