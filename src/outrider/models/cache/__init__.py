"""The cache of keys and values whose rows are slots, and what goes with it: sequences, positions, masks, sources."""
