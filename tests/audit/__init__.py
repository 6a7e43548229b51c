"""`outrider audit`."""
