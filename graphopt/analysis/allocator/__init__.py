"""torch's caching allocator, simulated: what a program takes of a device's memory, beyond the bytes of its tensors."""
