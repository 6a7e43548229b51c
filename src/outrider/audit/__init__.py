"""Is an output exact? Texts of any engine under the target's law, greedy ones token by token, and small laws enumerated."""
