"""C++ of our own for CPUs: the sources, how they are built on the user's machine, and what they offer to torch.

`models`: the passes of models with quantized weights. `sampling`: from logits to tokens.
"""
