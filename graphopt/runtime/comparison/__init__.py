"""Running a program and what passes make of it side by side: errors, and the smallest set of ops to blame.

In reading order: ``trial``, ``lockstep``, ``bisect``, ``tensor_errors``, ``granularity``.
"""
