"""The devices of which published figures are known, and the names of cost models; nothing here needs torch."""

from __future__ import annotations

__all__ = ["COSTS", "DEVICES"]

DEVICES = ("v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200")
"""The devices of ``graphopt.analysis.costs.profiles.PROFILES``."""

COSTS = ("measured", "roofline", *DEVICES)
"""The names of cost models: measured on this device, its roofline, the roofline of a device by name."""
