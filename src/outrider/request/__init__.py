"""From what a user names to prompts, drafters, draft lengths and laws."""
