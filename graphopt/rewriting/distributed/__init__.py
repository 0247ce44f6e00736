"""Gradient exchange: which gradients travel together, when, and what that costs.

In reading order: ``flat_exchange``, ``parameter_average``, ``local_steps``, ``outer_step``, ``agreed_decision``,
``rank_names``.
"""
