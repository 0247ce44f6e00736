"""The picture of the pipelines that passes were chosen from."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.cli.commands.test_plan_of_ranks import STEP
from tests.support.command import Command

SVG = "{http://www.w3.org/2000/svg}"


def test_every_pipeline_is_a_point_and_the_choice_has_a_ring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = Command(capsys)
    argv = ("advise", STEP, "--device", "h100-80gb", "--devices", "16", "--network", "1Gbit", "--memory", "636MB")
    file = tmp_path / "passes.svg"
    assert run(*argv, "--format", "svg", "-o", file).code == 0
    data = run(*argv, "--json").data
    circles = list(ET.parse(file).getroot().iter(f"{SVG}circle"))
    points = [circle for circle in circles if circle.get("class") != "chosen"]
    told = {circle.find(f"{SVG}title").text.split(":")[0]: circle for circle in points}  # type: ignore[union-attr]
    assert {circle.get("class") for circle in points} == {"point", "open"}
    simulated = [one for one in data["candidates"] if one["step"] is not None]
    assert set(told) == {one["passes"] or "no pass" for one in simulated}
    for one in simulated:
        assert told[one["passes"]].get("class") == ("point" if one["fits"] else "open")
    (ring,) = [circle for circle in circles if circle.get("class") == "chosen"]
    chosen = told[data["pipeline"]]
    assert (ring.get("cx"), ring.get("cy")) == (chosen.get("cx"), chosen.get("cy"))
    assert float(ring.get("cy", 0)) == max(float(told[one["passes"]].get("cy", 0)) for one in simulated if one["fits"])
