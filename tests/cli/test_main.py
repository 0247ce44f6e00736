from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import graphopt
from graphopt import Program
from graphopt.cli.arguments.command_line import command_line
from graphopt.cli.arguments.command_parser import commands_of
from graphopt.rewriting.registry import available_passes
from tests.support.command import FILE, RECOMPUTE, Command, Double, install, target


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


# --- arguments and exit codes ----------------------------------------------------------------------------------------


def test_version(run: Command) -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"graphopt {graphopt.__version__}\n")


@pytest.mark.parametrize("command", [(), ("passes",), ("tensors",), ("dump",), ("memory",), ("diff",)])
def test_help(run: Command, command: tuple[str, ...]) -> None:
    outcome = run(*command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: graphopt {' '.join(command)}".rstrip())
    assert not command or "--json" in outcome.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "required"),
        (("dmup", "x:y"), "did you mean 'dump'"),
        (("dump",), "TARGET"),
        (("plan", "x:y", "--budgt", "8GB"), "did you mean '--budget'"),
        (("help", "dmup"), "did you mean 'dump'"),
        (("dump",), "see: graphopt help dump"),
        (("dump", "x:y", "--stage", "jont"), "invalid choice: 'jont'"),
        (("dump", "x:y", "--format", "pdf"), "invalid choice: 'pdf'"),
        (("dump", "x:y", "--json", "--format", "dot"), "two formats"),
        (("dump", "x:y", "--after-each", "--format", "svg"), "one svg holds one program"),
        (("memory", "x:y", "--top", "0"), "'0' is not a whole number above 0"),
        (("diff", "x:y"), "--passes"),
        (("dump", "x:y", "blocks.*"), "unrecognized arguments: blocks.*"),
        (("tensors", "x:y", "--save"), "unrecognized arguments: --save"),
        (("tensors", "x:y", "--stage", "joint", "blocks.*", "--wide"), "unrecognized arguments: blocks.* --wide"),
        (("tensors", "x:y", "--min-bytes", "1 mile"), "'1 mile' is not a number of bytes"),
        (("tensors", "x:y", "--checkpoints", "--saved"), "not allowed with"),
    ],
)
def test_wrong_arguments_exit_with_2(run: Command, argv: tuple[str, ...], message: str) -> None:
    outcome = run(*argv)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.startswith("graphopt: error: ")


def test_help_is_a_command_and_has_the_exit_codes(run: Command) -> None:
    whole = run("help")
    assert whole.code == 0
    assert whole.out == run("--help").out
    for words in ("exit codes:", "0    fine", "1    it failed", "2    wrong use", "130", "GRAPHOPT_LOG"):
        assert words in whole.out
    assert run("help", "plan").out == run("plan", "--help").out


def test_help_keeps_to_80_columns(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("", *commands_of(command_line())):
        lines = run("help", *([command] if command else [])).out.splitlines()
        assert [line for line in lines if len(line) > 80 and not line.startswith("  graphopt ")] == []


# --- passes ----------------------------------------------------------------------------------------------------------


def test_passes_lists_what_is_installed(run: Command) -> None:
    outcome = run("passes", "--long")
    assert outcome.code == 0
    blocks = outcome.out.strip().split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == list(available_passes())
    block = next(block for block in blocks if block.startswith("recompute\n"))
    assert "Keep only checkpoints of forward" in block
    assert "stage: joint; numerics: bitwise" in block
    assert "option checkpoints: tuple[str, ...], required" in block
    assert "Args:" not in block


def test_passes_has_a_line_for_each_by_default(run: Command) -> None:
    lines = run("passes").out.splitlines()
    assert [line.split()[0] for line in lines[: len(available_passes())]] == list(available_passes())
    assert max(map(len, lines)) <= 80


def test_passes_explains_one(run: Command) -> None:
    outcome = run("passes", "recompute")
    assert outcome.code == 0
    assert "Args:\n" in outcome.out
    assert "sublinear" in outcome.out.lower()


def test_passes_as_data(run: Command) -> None:
    (data,) = run("passes", "recompute", "--json").data["passes"]
    assert data["name"] == "recompute"
    assert data["stage"] == "joint"
    assert data["options"] == [{"name": "checkpoints", "type": "tuple[str, ...]", "required": True, "default": None}]
    assert [entry["name"] for entry in run("passes", "--json").data["passes"]] == list(available_passes())


def test_unknown_pass_names_the_near_ones(run: Command) -> None:
    outcome = run("passes", "recompte")
    assert (outcome.code, outcome.out) == (2, "")
    assert (
        outcome.err
        == "graphopt: error: there is no pass called 'recompte'; did you mean 'recompute', 'recompute-evenly'?\n"
    )


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_tensors_lists_names_bytes_and_lines(run: Command) -> None:
    outcome = run("tensors", target("plain"), "blocks.*")
    assert (outcome.code, outcome.err) == (0, "")
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        (line,) = [line for line in outcome.out.splitlines() if line.split()[:1] == [name]]
        assert "f32[16, 8]" in line
        assert "targets.py" in line
    assert "head.weight" not in outcome.out


@pytest.mark.sweep
def test_tensors_as_data(run: Command) -> None:
    data = run("tensors", target("plain"), "--json").data
    rows = {row["name"]: row for row in data["tensors"]}
    assert rows["blocks.1"]["bytes"] == 16 * 8 * 4
    assert rows["blocks.1"]["shape"] == [16, 8]
    assert rows["head.weight"]["role"] == "parameter"


@pytest.mark.sweep
def test_tensors_of_each_stage(run: Command) -> None:
    names = {}
    for stage in ("forward", "joint", "step"):
        data = run("tensors", target("step"), "--stage", stage, "--json").data
        names[stage] = {row["name"] for row in data["tensors"]}
    assert "blocks.0" in names["forward"] & names["joint"] & names["step"]
    assert not any("~" in name for name in names["forward"])
    assert any("~" in name for name in names["joint"])
    assert "head.weight/exp_avg" in names["step"] - names["joint"]
    default = run("tensors", target("step"), "--json").data
    assert {row["name"] for row in default["tensors"]} == names["step"]


@pytest.mark.sweep
def test_tensors_filters(run: Command) -> None:
    everything = run("tensors", target("plain"), "--json").data["tensors"]
    saved = run("tensors", target("plain"), "--saved", "--json").data["tensors"]
    assert saved == [row for row in everything if row["saved"]]
    assert 0 < len(saved) < len(everything)
    large = run("tensors", target("plain"), "--min-bytes", "1kB", "--json").data["tensors"]
    assert large == [row for row in everything if row["bytes"] >= 1000]
    assert 0 < len(large) < len(everything)


def test_tensors_takes_patterns_on_both_sides_of_an_option(run: Command) -> None:
    data = run("tensors", target("plain"), "blocks.0", "--saved", "--json", "blocks.2").data
    assert [row["name"] for row in data["tensors"]] == ["blocks.0", "blocks.2"]


def test_tensors_lists_checkpoint_candidates(run: Command) -> None:
    rows = run("tensors", target("step"), "--checkpoints", "--json").data["checkpoints"]
    names = [row["name"] for row in rows]
    assert [name for name in names if name in ("blocks.0", "blocks.1", "blocks.2", "blocks.1.up")] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    assert next(row for row in rows if row["name"] == "blocks.1")["saves"] > 0
    text = run("tensors", target("step"), "blocks.1", "--checkpoints")
    assert "blocks.1" in text.out
    assert "blocks.0" not in text.out


def test_tensors_errors(run: Command) -> None:
    unknown = run("tensors", target("plain"), "block.1")
    assert unknown.code == 1
    assert "'block.1' names no tensor; did you mean 'blocks.1'" in unknown.err
    no_candidate = run("tensors", target("plain"), "blocks.1.up", "--checkpoints")
    assert no_candidate.code == 1
    assert "'blocks.1.up' names no checkpoint candidate" in no_candidate.err
    forward = run("tensors", target("plain"), "--checkpoints", "--stage", "forward")
    assert forward.code == 2
    assert "use --stage joint" in forward.err


# --- dump ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("plain-forward-# Small, forward stage",))
@pytest.mark.parametrize(
    ("name", "stage", "first"),
    [
        ("plain", "forward", "# Small, forward stage"),
        ("plain", None, "# Small, joint stage"),
        ("talkative", "joint", "# Small, joint stage"),
        ("with_loss", None, "# Small, joint stage"),
        ("step", "joint", "# Small, joint stage"),
        ("step", None, "# Small, step stage"),
        ("any_batch", None, "# Small, joint stage"),
    ],
)
def test_dump_shows_the_last_stage_or_the_wanted_one(run: Command, name: str, stage: str | None, first: str) -> None:
    outcome = run("dump", target(name), *(("--stage", stage) if stage else ()))
    assert outcome.code == 0
    assert outcome.out.startswith(first)


def test_what_the_users_code_prints_is_not_output(run: Command) -> None:
    outcome = run("dump", target("talkative"), "--json")
    assert Program.from_json(outcome.data).stage == "joint"
    assert "building the model" in outcome.err


@pytest.mark.sweep
def test_own_loss_only_where_the_target_says_so(run: Command) -> None:
    with_loss = Program.from_json(run("dump", target("labelled"), "--json").data)
    assert [spec.role for spec in with_loss.outputs if spec.role != "gradient"] == ["loss"]
    without = Program.from_json(run("dump", target("labelled_without_loss"), "--json").data)
    assert len(without.outputs_of("output")) == 2
    assert not without.outputs_of("loss")


def test_dump_formats(run: Command) -> None:
    def dumped(form: str) -> str:
        outcome = run("dump", target("plain"), "-p", RECOMPUTE, "--format", form)
        assert outcome.code == 0
        assert "recompute{checkpoints=blocks.*}: " in outcome.err
        return outcome.out

    assert "recompute: blocks" in dumped("text")
    ast.parse(dumped("python"))
    assert dumped("dot").lstrip().startswith("digraph")
    assert ET.fromstring(dumped("svg")).tag.endswith("svg")
    program = Program.from_json(json.loads(dumped("json")))
    assert program.history == (RECOMPUTE,)


@pytest.mark.sweep
def test_dump_after_each_heads_every_program(run: Command) -> None:
    outcome = run("dump", target("step"), "-p", RECOMPUTE, "--after-each")
    assert outcome.code == 0
    heads = [line for line in outcome.out.splitlines() if line.startswith("# ====")]
    assert heads[:2] == ["# ==== 1/4 forward stage: captured", "# ==== 2/4 joint stage: captured"]
    assert heads[2].startswith(f"# ==== 3/4 joint stage: {RECOMPUTE}: ")
    assert " recomputed" in heads[2]
    assert heads[3] == "# ==== 4/4 step stage: captured"
    assert sum(line.startswith("def step(") for line in outcome.out.splitlines()) == 4


@pytest.mark.sweep
def test_dump_after_each_ends_with_the_wanted_stage(run: Command) -> None:
    data = run("dump", target("step"), "-p", RECOMPUTE, "--after-each", "--stage", "joint", "--json").data
    labels = [entry["label"] for entry in data["snapshots"]]
    assert labels == ["captured forward", "captured joint", RECOMPUTE]
    assert [entry["pass"] is None for entry in data["snapshots"]] == [True, True, False]
    assert data["snapshots"][2]["pass"]["changed"]["recomputed"] > 0
    counts = [len(Program.from_json(entry["program"]).nodes) for entry in data["snapshots"]]
    assert counts[2] > counts[1] > counts[0]


def test_dump_after_each_shows_a_passs_own_lines(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Double)
    for form, comment in (("python", "#"), ("dot", "//")):
        outcome = run("dump", target("plain"), "-p", "double", "--after-each", "--format", form)
        assert f"\n{comment} ==== 3/3 joint stage: double: 1 doubled" in outcome.out
        assert f"\n{comment}   doubled the first output\n" in outcome.out


def test_dump_writes_a_file(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "program.txt"
    outcome = run("dump", target("plain"), "-o", file)
    assert (outcome.code, outcome.out) == (0, "")
    assert str(file) in outcome.err
    assert file.read_text(encoding="utf-8") == run("dump", target("plain")).out


def test_dump_says_where_it_cannot_write(run: Command, tmp_path: Path) -> None:
    no_folder = run("dump", target("plain"), "-o", tmp_path / "none" / "x.txt")
    assert (no_folder.code, no_folder.out) == (2, "")
    assert f"there is no folder {tmp_path / 'none'}" in no_folder.err
    folder = run("dump", target("plain"), "-o", tmp_path)
    assert (folder.code, folder.out) == (2, "")
    assert f"cannot write {tmp_path}: " in folder.err


# --- memory and diff -------------------------------------------------------------------------------------------------


def test_memory_shows_the_peak_before_and_after(run: Command) -> None:
    before = run("memory", target("plain"), "--json").data
    both = run("memory", target("plain"), "-p", RECOMPUTE, "--json").data
    assert both["before"] == before["program"]
    assert both["after"]["peak_bytes"] < both["before"]["peak_bytes"]
    (record,) = both["passes"]
    assert record["peak_bytes"] == [both["before"]["peak_bytes"], both["after"]["peak_bytes"]]


@pytest.mark.sweep
def test_memory_of_a_step_compares_with_the_step_without_passes(run: Command) -> None:
    before = run("memory", target("step"), "--json").data
    both = run("memory", target("step"), "-p", RECOMPUTE, "--json").data
    assert both["before"] == before["program"]
    assert both["after"]["peak_bytes"] != both["before"]["peak_bytes"]


def test_memory_as_text(run: Command) -> None:
    outcome = run("memory", target("plain"), "-p", RECOMPUTE, "--top", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"# {RECOMPUTE}: " in outcome.out
    assert "before" in outcome.out
    assert "after" in outcome.out
    assert len(run("memory", target("plain"), "--top", 1).out) < len(run("memory", target("plain"), "--top", 30).out)


def test_diff_shows_what_was_added(run: Command) -> None:
    outcome = run("diff", target("plain"), "-p", RECOMPUTE)
    assert outcome.code == 0
    assert outcome.out.startswith(f"# {RECOMPUTE}: ")
    added = [line for line in outcome.out.splitlines() if line.startswith("+") and "recompute: " in line]
    assert added
    data = run("diff", target("plain"), "-p", RECOMPUTE, "--json").data
    assert data["stage"] == "joint"
    assert data["passes"][0]["spec"] == RECOMPUTE
    assert data["diff"] in outcome.out


@pytest.mark.sweep
def test_diff_of_a_step_compares_with_the_step_without_passes(run: Command) -> None:
    outcome = run("diff", target("step"), "-p", RECOMPUTE)
    assert outcome.code == 0
    assert any(line.startswith("+") and "recompute: " in line for line in outcome.out.splitlines())
    assert not any(line.startswith("+") and "optimizer.step" in line for line in outcome.out.splitlines())


# --- as a process ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_python_m_graphopt_imports_modules_of_the_working_directory(tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "targets.py").write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    script = "import sys; sys.path.remove(''); from graphopt.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for command in (["-m", "graphopt"], ["-c", script]):
        done = subprocess.run(
            [sys.executable, *command, "tensors", "shop.targets:plain", "blocks.1", "--json"],
            capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [row["name"] for row in json.loads(done.stdout)["tensors"]] == ["blocks.1"]


def test_errors_of_a_process() -> None:
    command = [sys.executable, "-m", "graphopt", "passes", "recompte"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("graphopt: error: there is no pass called 'recompte'")


@pytest.mark.sweep
def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "graphopt", "passes"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
