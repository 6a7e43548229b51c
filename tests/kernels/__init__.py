"""Kernels of the CPU: products, attention, norms and rotations."""
