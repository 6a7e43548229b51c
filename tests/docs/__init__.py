"""The documents against the code."""
