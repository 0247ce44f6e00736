"""Programs as JSON and as text, and what reading a stranger's file takes.

In come programs, or plain data of which nothing is trusted; out comes the other. Nothing that is read is evaluated,
imported or called. Start with ``serialization``. In reading order: ``serialization``, ``deserialization``, ``text``,
``checked_json``, ``call_targets``, ``size_expressions``, ``toml_text``.
"""
