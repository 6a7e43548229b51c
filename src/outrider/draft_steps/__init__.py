"""The tokens of a draft that a model or a head draws, one after another: how they are drawn, and how sure it was of each."""
