"""What several ranks take: of each strategy of gradient exchange on plain data, and of a program with its exchanges.

In reading order: ``predict``, ``workload``, ``strategies``, ``collective``, ``compressed``, ``volume``, ``link``,
``measured_link``, ``step_timeline``, ``advice``, ``run_schedule``, ``predicted_step``.
"""
