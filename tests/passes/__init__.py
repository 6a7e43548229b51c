"""Passes that are recorded, compiled or called as chains."""
