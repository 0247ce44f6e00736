from __future__ import annotations

from graphopt.report.text.pass_table import passes_json, passes_text
from tests.support.command import Idle, Nothing


def test_catalogue_shows_types_defaults_and_constraints() -> None:
    text = passes_text([Nothing])
    assert text == (
        "nothing\n"
        "  Does nothing.\n"
        "  stage: joint; numerics: bitwise\n"
        "  option budget: float | None, default none\n"
        "  option names: tuple[str, ...], default a,b\n"
        "  option fast: bool, default false\n"
        '  option label: str, default ""\n'
        "  runs after recompute\n"
        "  requires first\n"
        "  conflicts with other, third\n"
        "  changes inputs or outputs of the program\n"
        "  from tests.support.command.Nothing"
    )
    assert "The second paragraph." in passes_text([Nothing], whole=True)
    assert "  no options\n" in passes_text([Idle])
    (data,) = passes_json([Nothing])
    assert (data["after"], data["conflicts"], data["changes_signature"]) == (["recompute"], ["other", "third"], True)
