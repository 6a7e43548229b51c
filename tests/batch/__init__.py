"""Batches of prompts."""
