"""Profiles of devices: the published ones, those in files, and what is wrong with a file."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError
from graphopt.analysis.allocator.rules import CACHING, PLAIN, AllocatorRules
from graphopt.analysis.costs.cost import check_cost, costs_of, profile_of_cost
from graphopt.analysis.costs.device_names import COSTS, DEVICE_FOLDER, DEVICES, FileOr, near_devices
from graphopt.analysis.costs.profiles import EFFICIENCY, PROFILES, DeviceProfile, device_profile
from graphopt.errors import ArgumentError
from graphopt.passes import FitMemory
from tests.support.costs import TOY, call, small_program
from tests.support.properties import examples

GOOD = """
name = "mine"
memory_bytes = 16_000_000_000
memory_bandwidth = 1e11
host_bandwidth = 2e10
overhead = 1e-6
[flops]
float32 = 1e12
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


# --- published -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_a_published_profile_is_named_after_its_file_and_has_sources(name: str) -> None:
    profile, data = PROFILES[name], tomllib.loads((DEVICE_FOLDER / f"{name}.toml").read_text())
    assert profile.name == name
    assert data["efficiency"] == EFFICIENCY
    assert profile.memory_bandwidth == pytest.approx(EFFICIENCY * data["memory_bandwidth"])
    assert profile.flops["float32"] <= max(profile.flops.values())
    assert any(str(year) in " ".join(profile.sources) for year in range(2017, 2027))
    assert profile.allocator == (CACHING if profile.kind == "cuda" else PLAIN)
    assert 0.9 * profile.memory_bytes < profile.usable_bytes <= profile.memory_bytes


@pytest.mark.parametrize(("tokens", "published"), [(512, 191e12), (1024, 260e12), (2048, 298e12), (16_384, 335e12)])
def test_attention_reaches_what_was_measured_of_its_kernels(tokens: int, published: float) -> None:
    """FlashAttention-3 (arXiv 2407.08608), figure 5: FlashAttention-2, forward, causal, 128 features a head."""
    profile = PROFILES["h100-80gb"]
    assert profile.attention_flops(torch.bfloat16, tokens, backward=False) == pytest.approx(published, rel=0.06)
    assert profile.attention_flops(torch.float32, tokens, backward=False) == profile.peak_flops(torch.float32)
    assert profile.attention_flops(torch.float16, tokens, backward=True) < 0.5 * profile.peak_flops(torch.float16)


def test_attention_of_unknown_kernels_reaches_the_rate_of_products() -> None:
    assert not TOY.attention
    assert TOY.attention_flops(torch.bfloat16, 512, backward=True) == TOY.peak_flops(torch.bfloat16)


def test_hopper_has_the_larger_workspace() -> None:
    assert [PROFILES[name].workspaces["cublas"] for name in ("h100-80gb", "h200")] == [32 * 2**20] * 2
    assert PROFILES["a100-80gb"].workspaces["cublas"] == PROFILES["b200"].workspaces["cublas"] == 8_519_680


def test_products_in_float32_are_faster_where_they_may_be_less_precise() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert PROFILES["h200"].peak_flops(torch.float32) == pytest.approx(EFFICIENCY * 494.7e12)
        assert PROFILES["v100-32gb"].peak_flops(torch.float32) == pytest.approx(EFFICIENCY * 15.7e12)
        torch.set_float32_matmul_precision("highest")
        assert PROFILES["h200"].peak_flops(torch.float32) == pytest.approx(EFFICIENCY * 67e12)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("A100", ["a100-40gb", "a100-80gb"]),
        ("NVIDIA A100-SXM4-80GB", ["a100-80gb"]),
        ("H100 PCIe", ["h100-pcie-80gb"]),
        ("NVIDIA GeForce RTX 4090", ["rtx-4090"]),
        ("rtx5090", ["rtx-5090"]),
        ("AMD Instinct MI300X", ["mi300x"]),
        ("EPYC 9554", ["epyc-9554"]),
        ("toaster", []),
    ],
)
def test_near_names_go_by_words(text: str, near: list[str]) -> None:
    assert near_devices(text) == near


@pytest.mark.parametrize("device", ["H100", 3, None, "", "h100-80gb.json"])
def test_what_is_no_device_is_refused_with_what_would_do(device: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"device is a DeviceProfile, a \.toml file with one, or one of 'a100-40gb'"
    ):
        device_profile(device)  # type: ignore[arg-type]


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_stands_wherever_a_device_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    profile = device_profile(path)
    assert device_profile(str(path)) == profile == device_profile(profile) == profile_of_cost(str(path))
    assert profile.kind == "cpu"
    assert str(path) in FileOr(DEVICES)
    assert list(FileOr(DEVICES)) == list(DEVICES)
    assert FitMemory("8GB", cost=str(path)).cost == str(path)
    assert profile_of_cost("measured") is None


def test_seconds_follow_the_file(tmp_path: Path) -> None:
    program = small_program()
    call(torch.ops.aten.mul.Tensor, torch.ones(1000), 2.0, program=program)
    path = written(tmp_path, GOOD)
    fast = sum(costs_of(program.memory(), str(path)).seconds)
    path.write_text(GOOD.replace("1e-6", "1.0"))
    assert sum(costs_of(program.memory(), str(path)).seconds) > 0.9 > fast


def test_rates_of_a_data_sheet_are_multiplied_by_the_efficiency(tmp_path: Path) -> None:
    plain, share = (DeviceProfile.load(written(tmp_path, text)) for text in (GOOD, "efficiency = 0.5\n" + GOOD))
    assert share.flops["float32"] == plain.flops["float32"] / 2
    assert share.host_bandwidth == plain.host_bandwidth / 2
    assert (share.overhead, share.memory_bytes) == (plain.overhead, plain.memory_bytes)


RATES = st.floats(min_value=1e-3, max_value=1e18)


@examples(5)
@given(st.text(max_size=20), RATES, st.integers(1, 2**50), st.dictionaries(st.text(max_size=5), RATES, max_size=3))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, source: str, rate: float, count: int, flops: dict[str, float]
) -> None:
    profile = dataclasses.replace(
        TOY,
        flops={**flops, "float32": rate},
        peer_bandwidth=rate,
        disk_bandwidth=rate,
        context_bytes=count,
        kind="cuda",
        allocator=AllocatorRules(expandable_segments=True, large_segment=20 * 2**20 + count),
        workspaces={"cublas": count},
        sources=(source,),
    )
    path = tmp_path_factory.mktemp("profiles") / "it.toml"
    try:
        found = DeviceProfile.load(profile.save(path))
    except GraphoptError:  # half of a character is no text
        assert not source.isascii() or not all(map(str.isascii, flops))
        return
    assert found == profile


@pytest.mark.parametrize("name", ["it.json", "it", "toml"])
def test_a_file_of_another_kind_is_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"does not end in \.toml"):
        TOY.save(tmp_path / name)
    assert not (tmp_path / name).exists()


WRONG = {
    "a field with a typing error": ("memory_bandwith = 1.0\n" + GOOD, "'memory_bandwith' means nothing here; did you"),
    "a field that is missing": (GOOD.replace("overhead = 1e-6", ""), "'overhead' is missing"),
    "a size as text": (GOOD.replace("16_000_000_000", '"16GB"'), r"\$.memory_bytes: expected a whole number"),
    "more memory than there can be": (GOOD.replace("16_000_000_000", "9" * 19), r"\$.memory_bytes: expected"),
    "a rate below 0": (GOOD.replace("1e12", "-1e12"), r"\$.flops.float32: expected a number of at least 0"),
    "a rate of 0": (GOOD.replace("1e12", "0"), r"flops\['float32'\] is 0.0"),
    "a rate without end": (GOOD.replace("1e12", "inf"), r"\$.flops.float32: expected a finite number"),
    "no rate for float32": (GOOD.replace("float32", "bfloat16"), r"lacks flops\['float32'\]"),
    "rates that are none": (GOOD.replace("[flops]\nfloat32 = 1e12", "flops = 3"), r"\$.flops: expected an object"),
    "another kind of device": ('kind = "tpu"\n' + GOOD, r"\$.kind: 'tpu' is not known here"),
    "an efficiency in per cent": ("efficiency = 75\n" + GOOD, r"\$.efficiency: expected a share"),
    "rules of the allocator that are none": (GOOD + "[allocator]\nround_byte = 1\n", "did you mean 'round_bytes'"),
    "a rule of another type": (GOOD + "[allocator]\ncaching = 1\n", r"\$.allocator.caching: expected true or false"),
    "attention without a rate": (GOOD + "[attention]\nforward = 1e12\n", r"attention\['backward'\] is 0"),
    "attention at a negative rate": (GOOD + "[attention]\nforward = -1\n", r"\$.attention.forward: expected"),
    "a workspace below 0": (GOOD + "[workspaces]\ncublas = -1\n", r"\$.workspaces.cublas: expected a whole number"),
    "temporaries below 0": (
        GOOD + '[temporaries]\n"aten.mm.default()" = -1\n',
        r"\$.temporaries\[.*\]: expected a whole number",
    ),
    "temporaries that are none": ("temporaries = 3\n" + GOOD, r"\$.temporaries: expected an object"),
    "a key of many parts": ("a" + ".a" * 40_000 + " = 1", "a key in line 1 has 40001 parts"),
    "a name on two lines": (GOOD.replace('"mine"', '"a\\nb"'), r"\$.name: a name that can be read on one line"),
    "devices of no number": ("devices_per_host = 0\n" + GOOD, "devices_per_host is 0"),
    "a source that is no text": ("sources = [1]\n" + GOOD, r"\$.sources\[0\]: expected text"),
    "no TOML": ("name =", "is not TOML"),
    "depth": ("x = " + "[" * 40_000, "nested too deeply|is not TOML"),
    "a file too large": ("#" * 1_000_001, "larger than the 1,000,000 bytes"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_wrong_file_is_refused_with_its_place(what: str, tmp_path: Path) -> None:
    text, message = WRONG[what]
    path = written(tmp_path, text)
    with pytest.raises(GraphoptError, match=message) as refused:
        DeviceProfile.load(path)
    assert "mine.toml" in str(refused.value)
    with pytest.raises(GraphoptError, match=message):
        check_cost(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match=r"there is no file .*; graphopt profile -o gone\.toml writes one"):
        FitMemory("8GB", cost=str(tmp_path / "gone.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(GraphoptError, match="cannot be read: Is a directory"):
        DeviceProfile.load(folder)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    with pytest.raises(GraphoptError, match="is not TOML"):
        DeviceProfile.load(tmp_path / "latin.toml")


def test_costs_name_every_device() -> None:
    assert set(COSTS) == {"measured", "roofline", *PROFILES}
