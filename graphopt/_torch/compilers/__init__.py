"""torch's compilers as graphopt uses them: Dynamo, which cuts, the partitioner's interface, and inductor's code.

In come functions and graphs; out come graphs that are cut, halves for autograd, and compiled code. Start with
``dynamo``. In reading order: ``dynamo``, ``compiled_calls``, ``partitioning``, ``inductor_code``.
"""
