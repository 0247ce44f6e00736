"""How bytes, seconds, counts and names are written for people, and read.

In reading order: ``written_units``, ``columns``, ``near_names``.
"""
