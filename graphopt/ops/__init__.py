"""Ops that passes insert, and what graphopt needs to know of the ops that torch has."""
