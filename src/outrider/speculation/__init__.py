"""Stochastic speculative execution of any two slow functions (Leviathan Section 6): see `speculation.run`.

Nothing is imported here, since worker processes import this package and need neither torch nor the models.
"""
