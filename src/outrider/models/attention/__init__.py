"""Attention of our own for models of transformers: with the same bits at any width, and for heads that share keys."""
