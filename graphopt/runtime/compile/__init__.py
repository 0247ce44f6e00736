"""From a program to code that runs: the generated GraphModule, inductor, or the user's own compiler."""
