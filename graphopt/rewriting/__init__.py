"""What a pass is, and what passes are built from."""
