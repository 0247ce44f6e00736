"""What a terminal shows while graphopt works.

In reading order: ``terminal``, ``progress_bar``, ``announced``, ``overview``, ``log_lines``, ``escape``.
"""
