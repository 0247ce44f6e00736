"""Tables and differences as text."""
