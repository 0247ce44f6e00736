"""Where measured figures are kept, and what is measured of a device and its links."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from graphopt import GraphoptError, Program
from graphopt.analysis.costs import figures
from graphopt.analysis.costs.cost import (
    EFFICIENCY,
    PROFILES,
    DeviceProfile,
    cache_folder,
    cost_report,
    link_bandwidth,
    op_seconds,
    profile_of,
    remeasure,
)
from graphopt.analysis.costs.figures import Figure, Figures
from tests.support.costs import TOY, call, kept, small_program, use_changed, use_folder

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def program() -> Program:
    made = small_program()
    for size in (3, 4, 5):
        call(aten.mm.default, torch.empty(size, size), torch.empty(size, size), program=made)
    return made


# --- figures that are kept -------------------------------------------------------------------------------------------


def test_what_was_measured_is_not_measured_again(program: Program, folder: Path) -> None:
    first = cost_report(program.nodes)
    assert first.measured > first.cached == 0
    second = cost_report(program.nodes)
    assert (second.measured, second.cached, second.runs) == (0, first.measured, 0)
    assert second.seconds == first.seconds
    written = kept(folder)
    assert len(written["seconds"]) == first.runs
    assert (written["torch"], written["threads"]) == (torch.__version__, "1")


def test_another_process_uses_the_figures_in_the_file(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = op_seconds(program.nodes)

    def poison(data: Any) -> None:
        for key in data["seconds"]:
            data["seconds"][key] = 1234.5

    use_changed(folder, poison, monkeypatch)
    report = cost_report(program.nodes)
    assert report.runs == 0
    assert report.seconds == tuple(1234.5 if seconds else 0.0 for seconds in before)
    assert 1234.5 not in op_seconds(program.nodes, cache=False)
    assert set(kept(folder.parent / "changed")["seconds"].values()) == {1234.5}


@pytest.mark.sweep
def test_without_the_cache_nothing_is_written(program: Program, folder: Path) -> None:
    for _ in range(2):
        report = cost_report(program.nodes, cache=False)
        assert report.measured > 0 == report.cached
    profile_of("cpu", cache=False)
    link_bandwidth("cpu", "host", cache=False)
    assert not folder.exists()


def test_each_number_of_threads_has_figures_of_its_own(program: Program, folder: Path) -> None:
    op_seconds(program.nodes)
    torch.set_num_threads(2)
    assert cost_report(program.nodes).cached == 0
    assert sorted(json.loads(path.read_text())["threads"] for path in folder.glob("*.json")) == ["1", "2"]


BROKEN: dict[str, bytes] = {
    "empty": b"", "cut off": b'{"format": 1, "sec', "not text": b"\xff\xfe\x00", "a list": b"[1, 2]",
    "nothing": b"null", "deep": b"[" * 200_000, "of another format": b'{"format": 99, "seconds": {}}',
    "of the format before": b'{"format": 1, "seconds": {"a": 1.0}}',
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_read_is_logged_and_replaced(
    case: str, program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op_seconds(program.nodes)
    use_changed(folder, lambda _: None, monkeypatch)
    (path,) = (folder.parent / "changed").glob("*.json")
    path.write_bytes(BROKEN[case])
    report = cost_report(program.nodes)
    assert report.measured > 0 == report.cached
    assert str(path) in caplog.text
    assert len(kept(path.parent)["seconds"]) == report.runs
    assert [found.name for found in path.parent.iterdir()] == [path.name]  # nothing else is left there


def test_figures_that_are_not_positive_numbers_are_left_out(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op_seconds(program.nodes)
    bad = [-1.0, float("nan"), float("inf"), "1.0", None, True, 0, 10**400]

    def spoil(data: Any) -> None:
        data["bandwidth"] = ["nothing"]
        data["seconds"] |= {key: bad[index] for index, key in enumerate(sorted(data["seconds"])[:3])}
        data["seconds"] |= {f"other {index}": value for index, value in enumerate(bad)}

    use_changed(folder, spoil, monkeypatch)
    report = cost_report(program.nodes)
    assert report.runs == 3
    assert all(0 <= seconds < float("inf") for seconds in report.seconds)
    assert "11 of the seconds" in caplog.text
    assert "have no 'bandwidth'" in caplog.text
    assert all(value > 0 for value in kept(folder.parent / "changed")["seconds"].values())


def test_a_folder_that_cannot_be_made_is_logged_and_figures_stay_in_memory(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "file" / "cache"))
    first = cost_report(program.nodes)
    assert first.measured > 0
    assert "cannot be written" in caplog.text
    caplog.clear()
    again = cost_report(program.nodes)
    assert (again.cached, again.seconds) == (first.measured, first.seconds)
    link_bandwidth("cpu", "host")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_folder_is_the_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("GRAPHOPT_CACHE", "")
    assert cache_folder() == Path("/xdg/graphopt")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "graphopt"


def test_writers_at_the_same_time_keep_what_the_others_wrote(tmp_path: Path) -> None:
    path, identity = tmp_path / "figures.json", {"device": "x"}
    one, other = Figures(path, identity), Figures(path, identity)
    one.put("seconds", "a", Figure(1.0))
    other.put("seconds", "b", Figure(2.0))
    one.put("profile", "c", Figure(3.0))
    one.save()
    other.save()
    both = Figures(path, identity)
    assert [both.get("seconds", key) for key in "ab"] == [Figure(1.0), Figure(2.0)]
    assert both.get("profile", "c") == Figure(3.0)
    assert both.get("seconds", "c") is None
    assert Figures(path, {"device": "y"}).get("seconds", "a") is None


@pytest.mark.parametrize("first", [True, False])
def test_a_doubtful_figure_is_kept_with_a_mark_and_does_not_replace_another(tmp_path: Path, first: bool) -> None:
    path, identity = tmp_path / "figures.json", {"device": "x"}
    doubtful, settled = Figures(path, identity), Figures(path, identity)
    doubtful.put("seconds", "a", Figure(9.0, doubtful=True))
    doubtful.put("seconds", "b", Figure(8.0, doubtful=True))
    settled.put("seconds", "a", Figure(1.0))
    for each in (doubtful, settled) if first else (settled, doubtful):
        each.save()
    data = json.loads(path.read_text())
    assert (data["seconds"], data["doubtful"]) == ({"a": 1.0, "b": 8.0}, {"seconds": ["b"]})
    assert doubtful.get("seconds", "b") == Figure(8.0, doubtful=True)
    later = Figures(path, identity)
    assert (later.get("seconds", "a"), later.get("seconds", "b")) == (Figure(1.0), None)


@pytest.mark.parametrize("marks", [None, 1, "a", ["a"], {"seconds": 1}, {"seconds": {"a": 1}}, {"seconds": [[], 1]}])
def test_marks_that_are_none_leave_the_figures_as_they_are(tmp_path: Path, marks: Any) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"format": 2, "seconds": {"a": 1.0}, "profile": {}, "bandwidth": {}, "doubtful": marks}))
    assert Figures(path, {}).get("seconds", "a") == Figure(1.0)


@pytest.mark.sweep
def test_what_is_measured_anew_replaces_what_is_in_the_file(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op_seconds(program.nodes)
    bandwidth = link_bandwidth("cpu", "host")

    def poison(data: Any) -> None:
        data["seconds"] = dict.fromkeys(data["seconds"], 1234.5) | {"of another program": 7.0}
        data["bandwidth"]["host"] = 80.0

    use_changed(folder, poison, monkeypatch)
    assert 1234.5 in op_seconds(program.nodes)
    monkeypatch.setattr(figures, "_fresh", False)
    remeasure()
    report = cost_report(program.nodes)
    assert report.cached == 0 < report.measured
    assert max(report.seconds) < 1234.5
    assert link_bandwidth("cpu", "host") != 80.0 != bandwidth
    written = kept(folder.parent / "changed")["seconds"]
    assert written.pop("of another program") == 7.0
    assert max(written.values()) < 1234.5
    assert cost_report(program.nodes).measured == 0


def _write_many(path: Path, name: str) -> None:
    mine = Figures(path, {})
    for index in range(40):
        mine.put("seconds", f"{name}{index}", Figure(1.0 + index))
        mine.save()


def test_a_reader_never_sees_half_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "figures.json"
    writers = [threading.Thread(target=_write_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        Figures(path, {})
    for writer in writers:
        writer.join()
    assert not caplog.records
    assert len(json.loads(path.read_text())["seconds"]) >= 40
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


# --- devices ---------------------------------------------------------------------------------------------------------


def test_the_cpu_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    profile = profile_of("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert {"float32", "float64", "bfloat16", "float16"} == profile.flops.keys()
    figures = [*profile.flops.values(), profile.memory_bandwidth, profile.host_bandwidth, profile.overhead]
    assert all(0 < value < float("inf") for value in figures)
    assert profile.memory_bytes > 1e8
    assert profile_of(torch.device("cpu")) == profile

    def poison(data: Any) -> None:
        data["profile"] |= {"memory_bandwidth": 5.0, "flops torch.float64": 6.0}
        data["bandwidth"]["host"] = 7.0
        data["doubtful"] = {}  # on a busy machine they are measured again

    use_changed(folder, poison, monkeypatch)
    other = profile_of("cpu")
    assert (other.memory_bandwidth, other.flops["float64"], other.host_bandwidth) == (5.0, 6.0, 7.0)
    assert other.flops["float32"] == profile.flops["float32"]


@pytest.mark.sweep
def test_without_a_profile_the_roofline_is_that_of_the_device_here(program: Program) -> None:
    here = op_seconds(program.nodes, method="roofline")
    assert here == op_seconds(program.nodes, method="roofline", profile=profile_of("cpu"))


def test_matrix_products_are_measured_in_the_dtypes_that_a_program_computes_in(program: Program, folder: Path) -> None:
    op_seconds(program.nodes)
    assert [key for key in kept(folder)["profile"] if key.startswith("flops")] == ["flops torch.float32"]
    assert profile_of("cpu", dtypes=(torch.float64,)).flops.keys() == {"float32", "float64"}


@pytest.mark.parametrize("device", ["meta", "xpu", "cuda:99", "nonsense"])
def test_a_device_that_is_not_here_cannot_be_measured(device: str) -> None:
    message = "is not a device" if device == "nonsense" else r"nothing can be measured on .* here: .*PROFILES"
    with pytest.raises(GraphoptError, match=message):
        profile_of(device)
    with pytest.raises(GraphoptError, match=message):
        link_bandwidth(device, "host")


def test_published_profiles_are_the_data_sheets_times_the_efficiency() -> None:
    assert {"v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "mi300x", "rtx-5090"} <= set(PROFILES)
    assert all(profile.name == name for name, profile in PROFILES.items())
    assert PROFILES["a100-40gb"].peak_flops(torch.bfloat16) == pytest.approx(EFFICIENCY * 312e12)
    assert PROFILES["v100-32gb"].peak_flops(torch.bfloat16) == PROFILES["v100-32gb"].peak_flops(torch.float32)
    assert PROFILES["h200"].memory_bandwidth == pytest.approx(EFFICIENCY * 4.8e12)
    assert len(set(PROFILES.values())) == len(PROFILES)  # they can be keys


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"flops": {"bfloat16": 1.0}}, r"lacks flops\['float32'\]"),
        ({"flops": {"float32": 1.0, "float16": 0.0}}, r"flops\['float16'\] is 0.0"),
        ({"memory_bandwidth": -1.0, "overhead": -2.0}, "memory_bandwidth is -1.0, overhead is -2.0"),
        ({"host_bandwidth": float("nan")}, "host_bandwidth is nan"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
    ],
)
def test_a_profile_with_a_wrong_figure_is_an_error(wrong: dict[str, Any], message: str) -> None:
    fields = {name: getattr(TOY, name) for name in TOY.__dataclass_fields__}
    with pytest.raises(GraphoptError, match=f"'toy'.*{message}"):
        DeviceProfile(**{**fields, **wrong})


# --- links -----------------------------------------------------------------------------------------------------------


def test_links_are_measured_once_and_shared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    host, slow = link_bandwidth("cpu", "host"), link_bandwidth("cpu", "disk", directory=disk)
    assert host > 0
    assert slow > 0
    assert list(disk.iterdir()) == []
    assert link_bandwidth("cpu", "host", ranks=4) == host / 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert link_bandwidth("cpu", "disk", directory=str(disk)) == slow / 8
    assert link_bandwidth("cpu", "host", ranks=1) == host
    assert set(kept(folder)["bandwidth"]) == {"host", f"disk {disk.resolve()}"}

    def poison(data: Any) -> None:
        data["bandwidth"]["host"] = 80.0
        data["doubtful"] = {}  # on a busy machine it is measured again

    use_changed(folder, poison, monkeypatch)
    assert link_bandwidth("cpu", "host") == 10.0


def test_a_link_that_does_not_exist_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphoptError, match="no tier 'tape': it is 'host' or 'disk'"):
        link_bandwidth("cpu", "tape")  # type: ignore[arg-type]
    with pytest.raises(GraphoptError, match="the tier 'host' has none"):
        link_bandwidth("cpu", "host", directory=tmp_path)
    with pytest.raises(GraphoptError, match=f"the disk at {tmp_path}/missing cannot be measured: .*No such file"):
        link_bandwidth("cpu", "disk", directory=tmp_path / "missing")
    for ranks in (0, -1, 1.5):
        with pytest.raises(GraphoptError, match=f"ranks is '{ranks}'"):
            link_bandwidth("cpu", "host", ranks=ranks)  # type: ignore[arg-type]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(GraphoptError, match="LOCAL_WORLD_SIZE is 'many'"):
        link_bandwidth("cpu", "host")
