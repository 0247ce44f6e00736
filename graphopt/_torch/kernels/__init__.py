"""Where tracing and eager mode run other kernels, or lay results out otherwise: eager mode's are taken.

In come calls of ops under a trace; out come results with eager mode's bits and strides. Start with ``eager_kernels``.
In reading order: ``eager_kernels``, ``eager_layouts``, ``odd_strides``.
"""
