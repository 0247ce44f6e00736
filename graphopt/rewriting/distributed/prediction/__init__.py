"""The dry run of gradient exchange: what each strategy would cost on a network, on plain data.

In reading order: ``predict``, ``workload``, ``strategies``, ``collective``, ``compressed``, ``volume``, ``link``,
``measured_link``, ``step_timeline``, ``advice``.
"""
