"""What a program is: the graph, names, state, invariants, its readable form, and the ops that passes insert."""
