"""Ops that put tensors elsewhere: to the host, to a disk, into one block, into a few bits, and back.

``transfer`` is what offloading inserts, ``swap`` what state between steps needs. In reading order: ``transfer``,
``swap``, ``contiguous``, ``quantize``, ``scaled_float8``.
"""
