"""Programs as text, Python, JSON, pictures, tables and differences."""
