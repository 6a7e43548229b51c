"""Speculation for any function (`outrider.speculate`)."""
