"""`outrider train`."""
