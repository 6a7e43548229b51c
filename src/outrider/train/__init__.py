"""Making drafts: texts, the target's states along them, losses, and the training itself (`outrider train`)."""
