"""`outrider bench` and `outrider tune`."""
