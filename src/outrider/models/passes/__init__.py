"""Passes without the model's Python: traced once, then recorded (CPU), compiled or captured as CUDA graphs."""
