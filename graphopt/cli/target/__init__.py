"""From the words of a command line to a captured program, and from a program to what is written.

In come options; out come the program that a command looks at, and its output as text or data. Start with
``programs``. In reading order: ``programs``, ``target``, ``model_config``, ``output``.
"""
