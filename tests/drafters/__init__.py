"""Drafters that are no heads: copies, tables, models with other tokenizers, early exit, a user's own."""
