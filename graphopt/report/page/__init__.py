"""A program, or all that passes made of one, as a single HTML file that needs nothing else.

Python computes what is shown (``data``) and where it stands (``sheet``); the scripts in ``assets`` only draw it.

In reading order: ``document``, ``data``, ``story``, ``pass_rows``, ``records``, ``changes``, ``lineage``, ``kept``,
``timeline_columns``, ``frontier_columns``, ``tree``, ``sheet``.
"""

from graphopt.report.page.document import page_of_program, page_of_rewritten, page_of_snapshots, page_of_story
from graphopt.report.page.story import MeasuredPeaks, Story, story_of_program, story_of_snapshots

__all__ = [
    "MeasuredPeaks",
    "Story",
    "page_of_program",
    "page_of_rewritten",
    "page_of_snapshots",
    "page_of_story",
    "story_of_program",
    "story_of_snapshots",
]
