"""GPUs (a simulated one, unless a real one is asked for) and jobs of several ranks."""
