"""Programs, memory timelines, frontiers and pipelines to choose from as SVG.

In reading order: ``picture``, ``layout``, ``folding``, ``visits``, ``memory_timeline``, ``chart``,
``frontier_chart``, ``advice_chart``, ``images``.
"""
