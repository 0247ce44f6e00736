from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphopt import GraphoptError
from graphopt.cli.target.target import Target, load_target
from tests.support.paths import SUPPORT

FILE = SUPPORT / "targets.py"
ZOO = """
class Zoo:
    @staticmethod
    def gnu():
        return nn.Linear(2, 2), torch.zeros(3, 2)
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Targets that a test imports and puts on the path are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in list(sys.modules):
        if name.startswith(("graphopt_target_", "shop_of_models", "neighbour_of_made")):
            del sys.modules[name]


def made(folder: Path, code: str, name: str = "build") -> Target:
    """The target ``name`` in a file with ``code``, which starts on line 5."""
    file = folder / "made.py"
    file.write_text(f"import torch\nfrom torch import nn\n\n\n{code}\n", encoding="utf-8")
    return load_target(f"{file}:{name}")


def error_of(text: str) -> str:
    with pytest.raises(GraphoptError) as caught:
        load_target(text)
    return str(caught.value)


def failing(folder: Path, code: str, name: str = "build") -> str:
    """The message for the target ``name`` in a file with ``code``; the file is called made.py in it."""
    with pytest.raises(GraphoptError) as caught:
        made(folder, code, name)
    return str(caught.value).replace(str(folder / "made.py"), "made.py")


# --- what a factory may return ---------------------------------------------------------------------------------------


def test_a_pair() -> None:
    target = load_target(f"{FILE}:plain")
    assert type(target.model).__name__ == "Small"
    assert [tuple(value.shape) for value in target.args] == [(16, 8)]
    assert (dict(target.kwargs), target.loss, target.optimizer, target.last_stage) == ({}, None, None, "joint")
    assert target.session().forward().stage == "forward"


def test_one_tensor_is_one_input() -> None:
    (value,) = load_target(f"{FILE}:talkative").args
    assert isinstance(value, torch.Tensor)


def test_a_dict() -> None:
    target = load_target(f"{FILE}:step")
    assert len(target.args) == 2
    assert callable(target.loss)
    assert isinstance(target.optimizer, torch.optim.AdamW)
    assert target.last_stage == "step"
    assert set(load_target(f"{FILE}:labelled").kwargs) == {"x", "labels"}


def test_the_models_own_loss_only_on_request(tmp_path: Path) -> None:
    assert load_target(f"{FILE}:labelled").loss is True
    assert load_target(f"{FILE}:labelled_without_loss").loss is None
    code = "def build(): return {'model': nn.Linear(2, 2), 'loss': False}"
    assert made(tmp_path, code).loss is None


def test_a_factory_inside_a_class(tmp_path: Path) -> None:
    assert isinstance(made(tmp_path, ZOO, "Zoo.gnu").model, torch.nn.Linear)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_made.py").write_text("WIDTH = 3\n", encoding="utf-8")
    code = (
        "from neighbour_of_made import WIDTH\n\n\ndef build():\n    return nn.Linear(WIDTH, 2), torch.zeros(2, WIDTH)"
    )
    assert tuple(made(tmp_path, code).args[0].shape) == (2, 3)


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop_of_models"
    package.mkdir()
    (package / "targets.py").write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_target("shop_of_models.targets:plain").last_stage == "joint"


# --- what is not there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["model.py", "pkg.module", ":build", "model.py:"])
def test_a_text_without_a_factory(text: str) -> None:
    assert f"{text!r} names no factory: write pkg.module:factory or path/file.py:factory" in error_of(text)


def test_missing_file_names_the_near_ones() -> None:
    assert "target.py'; did you mean 'targets.py'" in error_of(f"{FILE.with_name('target.py')}:plain")
    expected = f"there is no file 'nowhere/at/all.py'; the working directory is {Path.cwd()}"
    assert error_of("nowhere/at/all.py:plain") == expected


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    file.touch()
    assert error_of(f"{file}:build") == f"{str(file)!r} is no Python file: its name must end in .py"


def test_missing_module_names_the_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop_of_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small_ones.py").touch()
    monkeypatch.chdir(tmp_path)
    assert error_of("shop_of_model:f") == "there is no module 'shop_of_model'; did you mean 'shop_of_models'?"
    message = error_of("shop_of_models.smal_ones:f")
    assert message == "there is no module 'shop_of_models.smal_ones'; did you mean 'shop_of_models.small_ones'?"
    assert "'shop_of_models.small_ones' is a module, not a package" in error_of("shop_of_models.small_ones.x:f")
    assert f"modules are looked for in {tmp_path}" in error_of("qqq.yyy:f")


def test_a_file_that_imports_a_missing_module(tmp_path: Path) -> None:
    message = failing(tmp_path, "import torch_of_tomorrow")
    assert "importing made.py raised ModuleNotFoundError: No module named 'torch_of_tomorrow'" in message
    assert "where: made.py:5 in <module>: import torch_of_tomorrow" in message


def test_a_module_that_imports_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_of_models.py").write_text("import torch_of_tomorrow\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    message = error_of("shop_of_models:build")
    assert message.startswith(
        "importing shop_of_models raised ModuleNotFoundError: No module named 'torch_of_tomorrow'"
    )
    assert "shop_of_models.py:1 in <module>: import torch_of_tomorrow" in message


def test_missing_factory_names_the_near_ones(tmp_path: Path) -> None:
    assert "has no 'plane'; did you mean 'plain'" in error_of(f"{FILE}:plane")
    assert "made.py has no 'build'; it defines make_a_step" in failing(tmp_path, "def make_a_step(): pass")
    assert "made.py has no 'Zoo.get'; it defines gnu" in failing(tmp_path, ZOO, "Zoo.get")
    assert "made.py has no 'build'; it defines no functions" in failing(tmp_path, "del torch, nn")


# --- what can be wrong with a factory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("build = 3", "made.py:build is int 3, not a function"),
        ("def build(width): pass", "cannot be called without arguments (missing a required argument: 'width')"),
        ("def build(:", "importing made.py raised SyntaxError"),
        ("def build(:", "where: made.py:5: def build(:"),
        ("exit(3)", "importing made.py raised SystemExit: 3"),
        ("exit(3)", 'what to do: keep what runs as a script under if __name__ == "__main__":'),
        ("def build(): raise KeyError('width')", "made.py:build raised KeyError: 'width'"),
        ("def build():\n    raise KeyError('width')", "where: made.py:6 in build: raise KeyError('width')"),
        ("def build():\n    return nn.Linear(2, -2)", "where: made.py:6 in build: return nn.Linear(2, -2)"),
        ("def build(): pass", "made.py:build returned NoneType None; a factory returns (model, example_inputs), or a"),
        ("def build(): return 1, 2, 3", "made.py:build returned a tuple of 3 (int, int, int); a factory returns"),
        (
            "class build(nn.ReLU): pass",
            "made.py:build is the class build, and a TARGET names a factory: a function with",
        ),
        ("build = nn.Linear(2, 2)", "made.py:build is a model (of the class Linear), and a TARGET names a factory"),
        ("build = nn.Linear(2, 2)", "      def factory():\n          return build, (input,)"),
        ("build = nn.Bilinear(2, 2, 2)", "with tensors for input1 and input2, and name made.py:factory\n"),
        ("build = nn.Bilinear", "          return build(...), (input1, input2)"),
        ("def build(): return nn.ReLU()", "returned ReLU ReLU(): the example inputs are missing; a factory returns"),
        ("def build(): return nn.Linear, ()", "'model' is the class Linear, and must be an nn.Module: call it"),
        ("def build(): return 5, ()", "'model' is int 5, and must be an nn.Module"),
        ("def build(): return {'loss': True}", "'model' is missing"),
        ("def build(): return {'modle': 1}", "unknown key 'modle'; did you mean 'model'?"),
        ("def build(): return {'model': nn.ReLU(), 'zzz': 1}", "unknown key 'zzz'; known keys: model, example_inputs"),
        ("def build(): return nn.ReLU(), {'x': 1}", "'example_inputs' is a dict: return a dict with keyword inputs"),
        ("def build(): return nn.ReLU(), 3", "'example_inputs' is int 3, and must be a tuple of the positional inputs"),
        ("def build(): return {'model': nn.ReLU(), 'loss': 'mse'}", "'loss' is str 'mse', and must be loss(model"),
        (
            "def build(): return {'model': nn.ReLU(), 'kwargs': [1]}",
            "'kwargs' is a list of 1 (int), and must be",
        ),
        (
            "def build(): return {'model': nn.ReLU(), 'kwargs': {1: 2}}",
            "'kwargs' is dict {1: 2}, and must be a",
        ),
        (
            "def build(): return {'model': nn.ReLU(), 'optimizer': torch.optim.SGD}",
            "'optimizer' is the class SGD, and must be a torch.optim optimizer over model.parameters()",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, code: str, message: str) -> None:
    assert message in failing(tmp_path, code)


def test_all_mistakes_of_a_dict_at_once(tmp_path: Path) -> None:
    message = failing(tmp_path, "def build(): return {'modle': 1, 'kwargs': 2}")
    assert "unknown key 'modle'" in message
    assert "'model' is missing" in message
    assert "'kwargs' is int 2" in message


def test_errors_of_the_factory_keep_their_notes_and_cause(tmp_path: Path) -> None:
    code = "def build():\n    error = ValueError('no')\n    error.add_note('a note')\n    raise error"
    with pytest.raises(GraphoptError) as caught:
        made(tmp_path, code)
    assert caught.value.__notes__ == ["a note"]
    assert isinstance(caught.value.__cause__, ValueError)
