"""Captures that survive the process: what they depend on, how they are written, where they are kept."""
