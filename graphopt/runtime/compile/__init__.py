"""From a program to code that runs: the generated GraphModule, inductor, or the user's own compiler.

In reading order: ``backend``, ``functional``, ``partition``, ``kept_values``, ``pruned_backward``, ``dry_run``,
``inductor``, ``inductor_partitioner``.
"""
