"""The documents as they stand: Python runs, commands work, links lead somewhere, the README leads to a budget."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphopt import Pipeline
from graphopt.cli import main as cli
from graphopt.errors import GraphoptError
from tests.support.documents import DOCUMENTS, anchors, blocks, commands, links, run_blocks, text_of
from tests.support.paths import ROOT
from tests.support.training import Blocks, captured, next_token, results

PRINTED = {
    "README.md": [r"^fold-transposes: [1-9]\d* replaced; "],
    "passes/README.md": [
        r"^recompute\{checkpoints=layers\.\*\}: \d+ recomputed, 2 checkpoints, .*; peak .* -> ",
        r"^\{'0.up': addmm, 'hidden': gelu, '0::add': add, ",
        r"^peak .* of .* allowed",
        r"^offload\{.*\}: [1-9]\d* offloaded; ",
    ],
    "graphopt/README.md": [r"^3 calls of tanh_backward, one of them in forward$"],
    "CONTRIBUTING.md": [],
    "graphopt/ARCHITECTURE.md": [r"^predicted [\d,]+ bytes, measured [\d,]+ bytes$"],
}
"""Documents with Python blocks, and what these print."""


def test_all_documents_are_found() -> None:
    beside = {"passes/README.md", "examples/README.md", "notebooks/README.md", "tests/benchmarks/README.md"}
    assert beside | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "graphopt/ARCHITECTURE.md"} <= set(DOCUMENTS)
    assert {name for name in DOCUMENTS if blocks(name, "python")} == set(PRINTED)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor
@pytest.mark.parametrize("document", PRINTED)
def test_python_blocks_run_one_after_the_other(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(document, monkeypatch)
    printed = capsys.readouterr().out
    assert [pattern for pattern in PRINTED[document] if not re.search(pattern, printed, re.MULTILINE)] == []


@pytest.mark.parametrize("number", range(len(blocks("README.md", "python"))))
def test_each_block_of_the_readme_runs_by_itself(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks("README.md", monkeypatch, only=number)
    assert ("fold-transposes: " in capsys.readouterr().out) is (number == 1)


def test_a_row_of_a_table_is_read_by_itself() -> None:
    """What a row says does not begin in the row above."""
    rows = [line.split("|")[1].strip() for line in text_of("README.md").splitlines() if line.startswith("| ")]
    assert [row for row in rows if re.search(r" (do|does|too|likewise)$", row)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    wrong = [str(file) for file, _ in links(document) if not file.exists()]
    wrong += [
        f"{file}#{anchor}"
        for file, anchor in links(document)
        if anchor and file.suffix == ".md" and anchor not in anchors(file.relative_to(ROOT).as_posix())
    ]
    assert wrong == []


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    named = {name for document in DOCUMENTS for name in re.findall(r"`graphopt ([a-z][a-z-]*)", text_of(document))}
    assert {"plan", "view"} <= named
    assert [name for name in sorted(named) if cli.main(["help", name]) != 0] == []
    assert cli.main(["help", "exchange"]) != 0


SMALLER = {
    "models.py": {"layers: int = 12": "layers: int = 2", "context: int = 256": "context: int = 64"},
    "llama_7b.json": {'"num_hidden_layers": 32': '"num_hidden_layers": 1'},
    "fit_gpt.py": {"vocab=16384, context=1024, d=768, layers=24": "vocab=64, context=32, d=48, layers=2"},
}


@pytest.fixture(scope="module")
def small_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with two blocks in the GPT, of fewer tokens; ``test_examples`` has it at its size."""
    folder = tmp_path_factory.mktemp("small") / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in SMALLER.items():
        source = (folder / name).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert source.count(old) == 1
            source = source.replace(old, new)
        (folder / name).write_text(source, encoding="utf-8")
    return folder


def command_settings() -> list[Any]:
    """Every command, once; `make test` leaves out those that take the longest."""
    long = {"diff", "compare", "--after-each", "--format"}
    found = {" ".join(words): words for document in DOCUMENTS for words in commands(document, "graphopt")}
    return [
        pytest.param(words, marks=pytest.mark.sweep if long.intersection(words) else (), id=line)
        for line, words in found.items()
    ]


@pytest.mark.sweep(but=("passes", "profile cpu -o mine.toml"))
@pytest.mark.parametrize("arguments", command_settings())
def test_commands_work(
    arguments: list[str],
    small_examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").symlink_to(small_examples)
    (tmp_path / "config.json").symlink_to(small_examples / "llama_7b.json")  # of the reader's own
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
    text = "".join(map(text_of, DOCUMENTS))
    asked = {words[0] for document in DOCUMENTS for words in commands(document, "make")}
    asked |= set(re.findall(r"`make(?: [A-Z_]+=[^ `]*)* ([a-z]+)`", text))
    assert asked >= {"demo", "test", "help", "install"}
    assert asked <= targets


def test_scripts_in_commands_exist_and_every_script_has_one() -> None:
    pattern = r"(?:python|torchrun)\s+(?:--\S+ \d+ )?((?:examples|tests/benchmarks)/\w+\.py)"
    named = {name for document in DOCUMENTS for name in re.findall(pattern, text_of(document))}
    assert [name for name in named if not (ROOT / name).is_file()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"tests/benchmarks/\w+\.py", makefile)) <= named
    programs = {path for path in (ROOT / "examples").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert {f"examples/{path.name}" for path in programs} <= named


# --- from a clone to a budget ----------------------------------------------------------------------------------------


def loop() -> list[str]:
    """The lines of the README's one diff."""
    ((_, found),) = blocks("README.md", "diff")
    return found.splitlines()


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 200


def test_a_budget_takes_three_edits_and_five_lines_of_reading() -> None:
    edits = [line for line in loop() if line[:1] in ("+", "-") and line[1:].strip()]
    assert len(edits) <= 3
    text = text_of("README.md")
    until = text[text.index("## Install\n") : text.index("```diff\n")].splitlines()[1:]
    read = [line for line in until if line.strip() and not line.startswith("```")]
    assert len(read) + len(edits) <= 5


class MyModel(nn.Sequential):
    """Layers that keep several tensors for backward."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))))


def run_loop(sign: str, budget: str = "8GB") -> dict[str, Any]:
    """Run the lines of the diff with those of ``sign`` and without those of the other one."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(512, 32, generator=generator), torch.randint(32, (512,), generator=generator)
    names = {"MyModel": MyModel, "torch": torch, "F": F, "loader": [batch] * 2}
    lines = [line[1:] for line in loop() if line[:1] in ("", " ", sign)]
    torch.manual_seed(0)
    exec("\n".join(lines).replace('"8GB"', f'"{budget}"'), names)
    return names


def test_the_edited_loop_trains_as_the_plain_one_and_meets_budgets() -> None:
    plain, edited, fitted = run_loop("-"), run_loop("+"), run_loop("+", "80%")
    assert plain["loss"].requires_grad
    for other in (edited, fitted):
        assert torch.equal(plain["loss"], other["loss"])
        assert plain["model"].state_dict().keys() == other["model"].state_dict().keys()
        for name, value in plain["model"].state_dict().items():
            assert torch.equal(value, other["model"].state_dict()[name])
    assert edited["model"].records[0].peak_before == edited["model"].records[0].peak_after
    record = fitted["model"].records[0]
    assert record.peak_after <= 0.8 * record.peak_before
    ((_, said),) = blocks("README.md", "text")
    assert shape(said) == shape(str(record))


def shape(line: str) -> str:
    """A line of a record without its figures."""
    return re.sub(r"[\d.,]+( [GMk]?B| [mµ]?s)?", "#", re.sub(r"budget=[^}]*", "", line)).strip()


# --- the passes in CONTRIBUTING.md -----------------------------------------------------------------------------------


def test_the_passes_in_contributing_work(monkeypatch: pytest.MonkeyPatch) -> None:
    names = vars(run_blocks("CONTRIBUTING.md", monkeypatch))
    fold = next(source for _, source in blocks("CONTRIBUTING.md", "python") if "class FoldTransposes" in source)
    assert len([line for line in fold.splitlines() if line.strip()]) < 10
    assert fold.strip() in "\n".join(source for _, source in blocks("README.md", "python"))
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


def test_where_to_look_has_files_that_exist_with_the_names_in_them() -> None:
    section = text_of("graphopt/ARCHITECTURE.md").split("### Where to look")[1].split("\n### ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10
    for row in rows:
        source = ""
        for name in re.findall(r"`([^`]+)`", row.split(" | ")[1]):
            if name.endswith(".py"):
                source = (ROOT / "graphopt" / name).read_text(encoding="utf-8")
            elif source and name.isidentifier():
                assert re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE), f"{name} is not in {row}"
