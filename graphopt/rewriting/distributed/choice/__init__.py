"""Choices by the dry run: the size of buckets, dense or sparse, with whose momentum.

In come a program and a link; out comes one choice that all ranks take. In reading order: ``bucket_choice``,
``sparse_or_dense``, ``sparse_decision``.
"""
