"""From a program to code: which calls are taken in place, and the GraphModule that runs.

In comes a program; out comes a GraphModule with the boxed calling convention.
"""
