"""Recomputation, offload, and fitting a program into a number of bytes."""
