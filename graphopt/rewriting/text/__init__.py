"""Passes as text and as plain data, to objects and back.

Nothing that is read is evaluated or imported. Start with ``spec``. In reading order: ``spec``, ``pass_data``,
``yaml_text``.
"""
