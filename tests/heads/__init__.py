"""Draft heads on the target's states, ours and those of other projects."""
