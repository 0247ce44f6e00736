"""Which passes a model needs on a machine: the machine comes in, and a pipeline goes out, with what is predicted of it.

Pipelines are rewritten and simulated as they would run, those that may be fastest first. In reading order:
``choose_passes``, ``machine``, ``candidate_pipelines``, ``evaluation``, ``recommendation``, ``automatic``.
"""
