"""Pipelines in files: what they may look like, round trips in each format, and files that are not right."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, Pipeline, PipelineError, configs
from graphopt.ir.files.toml_text import toml_text
from graphopt.passes import ClipGradients, FitMemory, MixedPrecision, Offload, OffloadState, Recompute
from graphopt.rewriting.registry import available_passes
from graphopt.rewriting.text.pass_data import passes_from_data, passes_to_data
from graphopt.rewriting.text.spec import option_fields
from graphopt.rewriting.text.yaml_text import read_yaml, yaml_text
from tests.rewriting.text.test_spec import Options, find, options
from tests.support.properties import examples
from tests.support.training import Plain

PASSES = [
    MixedPrecision("float16", deny=("softmax", "blocks.*"), max_skipped=None),
    Recompute(("blocks.*", 'odd "name"\n')),
    Offload(prefetch=2),
    FitMemory("8GB", time_limit=1.5),
    ClipGradients(max_norm=1.0, norm_type=float("inf")),
]


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml", "yml"])
def test_a_pipeline_comes_back(tmp_path: Path, suffix: str) -> None:
    pipeline = Pipeline(PASSES)
    path = configs.save(pipeline, tmp_path / f"pipeline.{suffix}")
    assert configs.load(path).passes == configs.load(str(path)).passes == pipeline.passes
    assert Pipeline(path).passes == pipeline.passes
    assert configs.save([], path).read_text()
    assert configs.load(path).passes == ()


READ_AND_WRITE = {
    "toml": (tomllib.loads, toml_text, False),
    "json": (json.loads, json.dumps, True),
    "yaml": (read_yaml, yaml_text, True),
}


@pytest.mark.parametrize("form", READ_AND_WRITE)
@given(st.lists(options, max_size=1).map(lambda found: [*found, Plain()]))
@examples(40)
def test_any_options_survive_each_format(form: str, passes: list[Any]) -> None:
    read, write, null = READ_AND_WRITE[form]
    text = write(passes_to_data(passes, find, null=null))
    assert passes_from_data(read(text), find) == passes


@pytest.mark.parametrize(
    "passes",
    [
        {"recompute": {"checkpoints": ["a"]}, "offload": None},
        {"recompute": {"checkpoints": "a"}, "offload": {}},
        [{"recompute": {"checkpoints": ["a"]}}, "offload"],
        ["recompute{checkpoints=a},offload"],
        "recompute{checkpoints=a},offload",
        {"Recompute": {"checkpoints": ["a"]}, "offload": {"min_bytes": 1e6}},
    ],
    ids=str,
)
def test_ways_to_write_a_pipeline(tmp_path: Path, passes: Any) -> None:
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps({"passes": passes}))
    assert configs.load(path).passes == (Recompute("a"), Offload())


def test_a_file_is_taken_where_passes_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    path = configs.save(Recompute("1"), tmp_path / "pipeline.toml")
    optimized = graphopt.optimize(model, path)
    optimized(torch.randn(2, 4)).sum().backward()
    assert [record.name for record in optimized.records] == ["recompute"]


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ([], ["$: expected an object, found a list of 0"]),
        ({}, ["$: 'passes' is missing"]),
        ({"pases": {}}, ["$: 'passes' is missing; 'pases' stands there in its place"]),
        ({"recompute": {"checkpoints": ["a"]}}, ["$.recompute: a pass stands below 'passes'",
                                                 "[passes.recompute]"]),
        ({"passes": {}, "title": 1}, ["$: 'title' means nothing here; known are 'passes'"]),
        ({"passes": [{"name": "recompute", "checkpoints": ["a"]}]},
         ["$.passes[0]: expected an object whose one entry is a pass with its options, found one with 'name'",
          "'checkpoints'; in TOML write a table for each pass, [passes.recompute]"]),
        ({"passes": {}, "pases": {}}, ["$: 'pases' means nothing here; did you mean 'passes'?"]),
        ({"passes": 3}, ["$.passes: expected an object with an entry for each pass, or a list of passes, found 3"]),
        ({"passes": [3]}, ["$.passes[0]: expected a pass as text, or an object whose one entry is its name, found 3"]),
        ({"passes": {"recompte": {}}}, ["$.passes.recompte: there is no pass called 'recompte'; did you mean",
                                        "'recompute'"]),
        ({"passes": {"recompute": {}}}, ["$.passes.recompute: needs the option 'checkpoints'"]),
        ({"passes": {"recompute": {"checkpoint": 1}}}, ["$.passes.recompute.checkpoint: there is no such option; did",
                                                        "'checkpoints'"]),
        ({"passes": {"recompute": {"checkpoints": ["a", 3]}}},
         ["$.passes.recompute.checkpoints[1]: expected text, found 3"]),
        ({"passes": {"offload": {"min-bytes": 1, "min_bytes": 2}}}, ["$.passes.offload.min_bytes: given twice"]),
        ({"passes": {"offload": {"min-bytes": "1"}}}, ["min-bytes']: expected a whole number, found '1'"]),
        ({"passes": {"offload": {"tier": "tape"}}}, ["$.passes.offload: ", "tape"]),
        ({"passes": {"offload": {"tier": None}}}, ["$.passes.offload.tier: expected text, found nothing"]),
        ({"passes": {"clip-gradients": {"max-norm": 10**400}}}, ["expected a number of 64 bits"]),
        ({"passes": ["offload{tier=}"]}, ["$.passes[0]: expected a value here"]),
        ({"passes": {"offload": [], "recompute": 1}}, [
            "$.passes.offload: expected an object, found a list of 0; options stand there by name: tensors",
            "$.passes.recompute: expected an object, found 1; options stand there by name: checkpoints"]),
        ({"passes": ["offload", "offload"]}, ["'offload' is given twice"]),
        ({"zero_optimization": {}}, ["graphopt.configs.from_deepspeed reads such a file"]),
        ({"recompute_configs": {}}, ["graphopt.configs.from_paddle reads such a file"]),
    ],
    ids=str,
)  # fmt: skip
def test_documents_that_are_not_right(tmp_path: Path, document: Any, messages: list[str]) -> None:
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PipelineError) as error:
        configs.load(path)
    assert [message for message in messages if message not in str(error.value)] == [], str(error.value)


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\npasses: *b\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.toml", None, "there is no file"),
        ("pipeline.txt", "", r"the end of its name says which format .*known are \.toml"),
        ("pipeline.tml", "", r"did you mean '\.toml'"),
        ("pipeline.toml", "passes = ", "is not TOML: "),
        ("pipeline.toml", "a = " + "[" * 100_000, "nested too deeply"),
        ("pipeline.toml", "a" + ".a" * 40_000 + " = 1", "a key in line 1 has 40001 parts"),
        ("pipeline.json", "{", "is not JSON: "),
        ("pipeline.json", '{"passes": {"offload": {}, "offload": {}}}', "'offload' stands twice"),
        ("pipeline.json", '{"passes": {"offload": {"min-bytes": ' + "9" * 5000 + "}}}", "is not JSON: "),
        ("pipeline.json", "[" * 100_000, "nested too deeply"),
        ("pipeline.json", " " * 1_000_001, "at most 1,000,000 are read"),
        ("pipeline.json", b"\xff\xfe", "is no text in UTF-8"),
        ("pipeline.yaml", "passes: [", "is not YAML: "),
        ("pipeline.yaml", BOMB, "aliases are not read"),
        ("pipeline.yaml", "passes: {offload: {}, offload: {}}", "a name stands twice"),
        ("pipeline.yaml", "passes: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("pipeline.yaml", "passes: {offload: {tier: 2001-01-01}}", "expected text, found datetime"),
        ("pipeline.yaml", "passes: {1: {}}", "expected text, found 1"),
        ("pipeline.yaml", "passes: {[1]: {}}", "is not YAML: "),
        ("pipeline.yaml", "passes: " + "[" * 10_000, "nested too deeply"),
        ("pipeline.yaml", "passes: " + "[x," * 10_000, "nested too deeply"),
        ("pipeline.yaml", "passes: " + "{" * 10_000, "nested too deeply"),
        ("pipeline.yaml", "- " * 20_000, "nested too deeply"),
        ("pipeline.yaml", "passes: [" + "a," * 30_000 + "]", "at most 50,000 are read"),
        ("pipeline.yaml", "", "expected an object, found None"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_that_are_not_right(tmp_path: Path, name: str, text: str | bytes | None, message: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(GraphoptError, match=message):
        configs.load(path)


def test_a_folder_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline.toml"
    folder.mkdir()
    with pytest.raises(GraphoptError, match="cannot be read: Is a directory"):
        configs.load(folder)
    with pytest.raises(GraphoptError, match="cannot be written: Is a directory"):
        configs.save("offload", folder)


def test_a_pass_that_is_not_registered_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="there is no pass called 'options'"):
        configs.save([Options()], tmp_path / "pipeline.toml")


def test_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text("passes: {}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(GraphoptError, match="YAML needs PyYAML, which is not installed: pip install pyyaml"):
        configs.load(path)
    with pytest.raises(GraphoptError, match="YAML needs PyYAML"):
        configs.save("offload", path)


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
@given(text=st.text(max_size=30))
@examples(100)
def test_any_text_is_read_or_refused(suffix: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(text.encode())
    try:
        configs.load(path)
    except GraphoptError as error:
        said = str(error)
    else:
        said = str(path)
    assert str(path) in said


def test_many_names_on_a_line_are_no_key_of_many_parts(tmp_path: Path) -> None:
    names = tuple(f"model.layers.{number}.mlp.down_proj" for number in range(300))
    path = tmp_path / "pipeline.toml"
    configs.save([Recompute(names)], path)
    assert configs.load(path).passes == Pipeline([Recompute(names)]).passes


def test_a_key_of_many_parts_does_not_hide_behind_a_string(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text("x = {a = '''\n\"''', " + "b." * 40_000 + 'b = "1"}')
    with pytest.raises(GraphoptError, match="a key in line 2 has"):
        configs.load(path)


def test_the_line_is_named_where_it_is_clear(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text("# a comment\n[passes.recompute]\ncheckpoint = ['a']\n\n[passes.offload]\nmin-bytes = 'many'\n")
    with pytest.raises(PipelineError) as error:
        configs.load(path)
    assert "$.passes.recompute.checkpoint (line 3): there is no such option" in str(error.value)
    assert "$.passes.offload['min-bytes'] (line 6): expected a whole number" in str(error.value)
    path.write_text("[passes.recompute]\ntier = 1\n\n[passes.offload]\ntier = 1\n")
    with pytest.raises(PipelineError, match=r"\$\.passes\.offload\.tier: expected text"):
        configs.load(path)


# --- where a file may write ------------------------------------------------------------------------------------------


def writing(path: Path, folder: object) -> Path:
    """A file whose pass keeps finished steps in a folder."""
    forms = {
        ".toml": f"[passes.offload-state]\nfolder = {json.dumps(str(folder))}\n",
        ".json": json.dumps({"passes": [f'offload-state{{folder="{folder}"}}']}),
        ".yaml": f"passes: {{offload-state: {{folder: {json.dumps(str(folder))}}}}}",
    }
    path.write_text(forms[path.suffix])
    return path


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_a_file_does_not_say_where_files_go(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHOPT_DUMP", raising=False)
    path = writing(tmp_path / f"pipeline.{suffix}", tmp_path / "states")
    with pytest.raises(PipelineError) as error:
        configs.load(path)
    said = str(error.value)
    assert f"'{path}': offload-state is to write to folder='{tmp_path / 'states'}'" in said
    assert "allow_write=FOLDER" in said
    assert "--allow-write FOLDER" in said
    with pytest.raises(PipelineError, match="is to write to"):
        Pipeline(path)
    with pytest.raises(PipelineError, match="is to write to"):
        graphopt.optimize(nn.Linear(2, 2), path)
    for allowed in (tmp_path, str(tmp_path / "states")):
        assert configs.load(path, allow_write=allowed).passes == (OffloadState(folder=str(tmp_path / "states")),)
    assert Pipeline(OffloadState(folder=str(tmp_path / "states"))).passes
    assert not (tmp_path / "states").exists()


def test_the_folder_of_the_run_is_one_that_the_user_has_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = writing(tmp_path / "pipeline.toml", tmp_path / "run" / "states")
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "run"))
    assert configs.load(path).passes
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "other"))
    with pytest.raises(PipelineError, match=r"allowed is what is below '.*other'"):
        configs.load(path)


@pytest.mark.parametrize("folder", ["ok/../../outside", "ok/link/x", "okay", "/", "..", "a\x00b", "ok/link/../y"])
def test_no_way_out_of_the_folder(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ok" / "link").symlink_to(tmp_path / "elsewhere")
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps({"passes": {"offload-state": {"folder": folder}}}))
    with pytest.raises(PipelineError, match=r"a file does not say where files go|is no path"):
        configs.load(path, allow_write="ok")


def test_what_is_allowed_is_a_path(tmp_path: Path) -> None:
    path = writing(tmp_path / "pipeline.toml", tmp_path)
    with pytest.raises(graphopt.ArgumentError, match="allow_write is the path of a folder, got True"):
        configs.load(path, allow_write=True)  # type: ignore[arg-type]


def test_every_option_with_a_place_to_write_to_says_so() -> None:
    """Of graphopt's own passes; a new option whose name sounds like a path is looked at here."""
    path = re.compile(r"\b(folder|path|file|dir|directory)\b")
    options = {(name, option.name): option for name, cls in available_passes().items() for option in option_fields(cls)}
    found = {key for key, option in options.items() if option.writes or path.search(option.name)}
    assert found == {("offload-state", "folder")}
    assert options["offload-state", "folder"].writes
