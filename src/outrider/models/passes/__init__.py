"""Passes without the model's Python: traced once, then recorded (CPU), compiled (CPU) or captured as CUDA graphs."""
