"""``optimize_step``: forward, loss, backward and update as one program, called like a function.

In come a model, an optimizer, a loss and passes; out comes a ``TrainStep``. Start with ``optimize_step``, then
``train_step``; ``step_programs`` has the programs behind it. In reading order: ``optimize_step``, ``load_step``,
``train_step``, ``step_programs``, ``step_variants``, ``step_progress``, ``step_state``, ``kept_state``,
``live_settings``, ``closures``, ``uneven_ends``, ``skipped_steps``, ``scaler``, ``ineffective_calls``.
"""
