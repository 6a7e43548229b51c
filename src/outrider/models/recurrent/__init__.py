"""Models with layers that keep a state instead of keys and values."""
