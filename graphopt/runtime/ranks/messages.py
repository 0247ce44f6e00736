"""What ranks tell each other through the store of their process group: where each is, and which are at fault."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Report", "Verdict", "is_kept", "publish", "published", "read_reports", "write_report"]

_REPORT = "graphopt/ranks/{}"
_VERDICT = "graphopt/ranks/verdict"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself.

    Attributes:
        token: tells this process from another that had the same rank before.
        beat: grows with every report.
        where: the step and the call that it was at, for people.
        exchanges: whether it was talking to other ranks there.
        seconds: how long it had been there.
        failed: empty; ``exchange`` after an exchange failed there; otherwise the error that ended its step.
        told: whether it knows which ranks are at fault, and needs the store no longer.
        ended: whether its process is on the way out.
        step: how many steps had begun there.
    """

    token: str
    beat: int = 0
    where: str = ""
    exchanges: bool = False
    seconds: float = 0.0
    failed: str = ""
    told: bool = False
    ended: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks are at fault.

    Attributes:
        ranks: what is the matter with each of them, by rank of the default group; empty where none is at fault.
        tokens: of their processes, so that the verdict is not taken for one on processes that came later.
    """

    ranks: dict[int, str]
    tokens: dict[int, str]


def write_report(store: Any, rank: int, report: Report) -> None:
    """Replace the report of a rank.

    Raises:
        RuntimeError: where the store does not answer, as from all functions here.
    """
    store.set(_REPORT.format(rank), _text(report))


def is_kept(store: Any, rank: int, report: Report) -> bool:
    """Whether a store gives back the report that was written last; that of torch's fake backend forgets everything."""
    return bool(store.get(_REPORT.format(rank)).decode() == _text(report))


def _text(said: Report | Verdict) -> str:
    return json.dumps(asdict(said))


def read_reports(store: Any, ranks: Iterable[int]) -> dict[int, Report | None]:
    """The latest report of each rank; None of a rank that has written none."""
    keys = {rank: _REPORT.format(rank) for rank in ranks}
    there = keys if store.check(list(keys.values())) else {r: key for r, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(there.values())) if there else []
    found = {rank: Report(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}
    return {rank: found.get(rank) for rank in keys}


def published(store: Any) -> Verdict | None:
    """The verdict on these processes that a rank has published, if any."""
    if not store.check([_VERDICT]):
        return None
    found = _verdict(store.get(_VERDICT))
    return found if _is_current(store, found) else None


def publish(store: Any, verdict: Verdict) -> Verdict:
    """Make a verdict known to all ranks.

    Returns:
        the verdict that all of them take: another rank may have been first with its own.
    """
    text = _text(verdict)
    before = store.get(_VERDICT).decode() if store.check([_VERDICT]) else ""
    while True:
        if before and _is_current(store, _verdict(before)):
            return _verdict(before)
        after = store.compare_set(_VERDICT, before, text).decode()
        if after == text:
            return verdict
        before = after


def _verdict(text: bytes | str) -> Verdict:
    found = json.loads(text)
    return Verdict(*({int(rank): value for rank, value in found[part].items()} for part in ("ranks", "tokens")))


def _is_current(store: Any, verdict: Verdict) -> bool:
    reports = read_reports(store, verdict.ranks)
    return all((report.token if report else "") == verdict.tokens[rank] for rank, report in reports.items())
