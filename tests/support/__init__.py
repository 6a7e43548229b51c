"""What serves all and knows none: clocks, garbage, inference mode, memory."""
