"""Many prompts: a file of them through one continuous batch, in this process or in several (Ray)."""
