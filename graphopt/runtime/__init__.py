"""Running programs: binding inputs, compiling, the drop-in module and the training step."""
