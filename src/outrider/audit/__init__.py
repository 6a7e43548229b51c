"""Proof of exactness: the law enumerated, and greedy output compared token by token."""
