"""Ranks that are watched: where each is, whether it is alive, and which are at fault."""
