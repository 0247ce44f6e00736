"""What the commands of the command line share, and commands that have a file of their own.

In reading order: ``main``, ``interruption``.
"""
