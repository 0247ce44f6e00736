"""What a plan takes: from decisions to the runs that follow, and from runs to bytes at each step.

In come decisions; out come runs, bytes and seconds, thousands of times in a search. Start with ``schedule``;
``candidates`` is what searches compare. In reading order: ``schedule``, ``stops``, ``candidates``, ``step_trace``,
``step_bytes``, ``edits``, ``edited_bytes``, ``idle``.
"""
