"""Which ranks are at fault where an exchange failed: those that died, hang, or failed by themselves."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from graphopt.runtime.ranks.messages import Report, Verdict, publish, published, read_reports

__all__ = ["classify", "collect", "wait_for_readers"]


def classify(reports: Mapping[int, Report | None], beating: Collection[int]) -> Verdict:
    """Who is at fault, by what all ranks wrote.

    A rank whose exchange failed is a victim, also when it has ended since. Ranks that are dead, ended or failed by
    themselves are at fault; where there are none, ranks that go on giving signs of life without waiting for others are:
    they hang where they are, or are far behind.

    Args:
        reports: the latest of each rank, None of one that never wrote any.
        beating: the ranks that have written anew while they were looked at.

    Returns:
        a verdict without ranks where nobody is at fault.
    """
    gone: dict[int, str] = {}
    late: dict[int, str] = {}
    for rank, report in sorted(reports.items()):
        if report is None:
            gone[rank] = "gave no sign of life: its process ended before its first step, or is still on the way there"
        elif report.failed == "exchange":
            continue
        elif report.failed:
            gone[rank] = f"failed by itself: {report.failed} (in {report.where})"
        elif report.ended:
            gone[rank] = f"ended its program (last seen in {report.where})"
        elif rank not in beating:
            gone[rank] = (
                "gives no sign of life any more: its process was killed, is stopped or cannot be reached "
                f"(last seen in {report.where})"
            )
        elif not report.exchanges:
            late[rank] = f"hangs, or is far behind: it has been in {report.where} for {report.seconds:.1f} s"
    found = gone or late
    tokens = {rank: report.token if report else "" for rank, report in reports.items() if rank in found}
    return Verdict(found, tokens)


def collect(store: Any, ranks: Collection[int], patience: float, interval: float) -> Verdict:
    """Look at the other ranks until it is clear who is at fault.

    All ranks get the same verdict: that of the first one that publishes its own.

    Args:
        store: a client for this thread alone.
        ranks: that could be at fault.
        patience: for how many seconds a rank may be silent before it counts as dead.
        interval: seconds between two reports of a rank.

    Raises:
        RuntimeError: where the store does not answer.
    """
    first: dict[int, Report | None] = {}
    beating: set[int] = set()
    end = time.monotonic() + patience
    while True:
        known = published(store)
        if known is not None:
            return known
        reports = read_reports(store, ranks)
        first = first or reports
        beating |= {rank for rank, report in reports.items() if report != first[rank]}
        if time.monotonic() > end or all(_settled(report) for report in reports.values()):
            break
        time.sleep(interval / 4)
    verdict = classify(reports, beating)
    return publish(store, verdict) if verdict.ranks else verdict


def _settled(report: Report | None) -> bool:
    return report is not None and (bool(report.failed) or report.ended)


def wait_for_readers(store: Any, ranks: Iterable[int], seconds: float, interval: float) -> None:
    """Wait until ranks need the store no longer: for the rank whose process holds it.

    Args:
        store: a client for this thread alone.
        ranks: the others, without those that are dead.
        seconds: how long at most.
        interval: seconds between two reports of a rank.

    Raises:
        RuntimeError: where the store does not answer.
    """
    waiting = list(ranks)
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        reports = read_reports(store, waiting)
        waiting = [rank for rank, report in reports.items() if report and not (report.told or report.ended)]
        if waiting:
            time.sleep(interval / 8)
