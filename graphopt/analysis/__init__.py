"""What can be known of a program without changing it: memory, structure, measurements.

In reading order: ``liveness``, ``known_timelines``, ``device_timelines``, ``workspace``, ``workspace_formulas``,
``measured_peak``, ``program_replay``, ``dominators``, ``returned_loss``, ``smaller_calls``, ``host_waits``.
"""
