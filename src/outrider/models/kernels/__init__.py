"""Kernels of our own for CPUs: their source, how they are built, and the layers that call them."""
