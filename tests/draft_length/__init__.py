"""How long drafts are: costs, plans, what is learned, what drafts that do not pay may lose."""
