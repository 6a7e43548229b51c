"""Pages to look at: what a run did, as files that open in any browser."""
