"""What layers above give to those below: methods of programs, and formats they are written in.

In come functions that ``report/register.py`` registers; out comes what ``program.memory()`` and the like call. In
reading order: ``handed_down``, ``methods``, ``formats``.
"""
