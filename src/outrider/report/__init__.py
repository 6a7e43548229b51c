"""Figures and self-contained HTML pages of what was computed or measured."""
