"""From logits to a law and to tokens drawn from it: filters, kernels, constraints."""
