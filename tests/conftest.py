"""Settings for every test: one thread, a fixed seed, no dump directory from outside, the figures of one machine."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings

from graphopt.report.console import announced
from tests.support import searching
from tests.support.fixed_figures import keep_figures
from tests.support.properties import examples
from tests.support.sweeping import check_core, sweep_cases

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, the notebooks' kernels among them

settings.register_profile("graphopt", examples(25))  # where a test says nothing else
settings.load_profile("graphopt")

gc.disable()  # until everything is imported

# pytest gives a handler to each logger that does not propagate, and with one torch formats a traceback per record.
logging.getLogger("torch.__trace").propagate = True


class _NamedAtOnce:
    """Writes the name of each test that fails when it does: a run of hours may be stopped before it lists them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nfailed: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NamedAtOnce(config))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """All cases of a test, before any of them is selected."""
    made = yield
    if isinstance(made, list):
        sweep_cases(made)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.sweep)
    check_core(items, whole=config.args == config.getini("testpaths") and not config.getoption("ignore"))


def pytest_collection_finish() -> None:
    gc.enable()
    _leave_out_of_searches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Between files, when their fixtures are gone, what they imported and cached is left to stay."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _leave_out_of_searches()
    return result


def _leave_out_of_searches() -> None:
    """Leave what is there to stay out of every later search for garbage, which would take a second and more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.delenv("GRAPHOPT_DUMP", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # which says how wide reports are
    monkeypatch.setattr(announced, "_SOON", 3600.0)  # the log does not depend on how busy the machine is


@pytest.fixture(autouse=True, scope="session")
def _figures_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHOPT_CACHE", str(tmp_path_factory.mktemp("figures")))
        patch.setenv("GRAPHOPT_CACHE_PROGRAMS", "0")  # every test captures what it looks at
        torch.set_num_threads(1)  # which the figures are for
        keep_figures()
        yield


@pytest.fixture(autouse=True, scope="session")
def _searched_shortly() -> Iterator[None]:
    with searching.short_search():
        yield


@pytest.fixture(scope="module")
def whole_search() -> Iterator[None]:
    """Plans are searched as for users."""
    with searching.whole_search():
        yield
