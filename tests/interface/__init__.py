"""The Python interface, the drop-in for transformers, the examples."""
