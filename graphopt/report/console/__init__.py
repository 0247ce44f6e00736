"""What a terminal shows while graphopt works."""
