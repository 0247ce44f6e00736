"""Loops that others own: Trainers of transformers and Lightning, and Accelerate. Each needs its library installed."""
