"""Which draft, and how long? Measured on the target's own text, predicted for every length, tried, and written down."""
