"""Layers that call kernels of our own (`outrider.kernels`), and what puts their operations together."""
