"""Bytes of a program: the timeline of what is alive, what an allocator reserves for it, every named tensor.

These are the results that ``Program.memory``, ``Program.reserved`` and ``Program.tensors`` give; analyses above
compute them. In reading order: ``timeline``, ``described_tensors``.
"""
