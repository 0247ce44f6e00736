"""Programs, memory timelines and frontiers as SVG.

In reading order: ``picture``, ``layout``, ``folding``, ``visits``, ``memory_timeline``, ``frontier_chart``,
``images``.
"""
