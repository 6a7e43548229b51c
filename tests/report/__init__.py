"""Pages: the report of measurements and the trace."""
