"""The loop of rounds: engines, threads, alternatives, streamed text, records."""
