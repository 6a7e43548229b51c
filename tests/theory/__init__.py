"""The papers' formulas and tables."""
