"""The laws that all else rests on: the acceptance rule, whole continuations, every drafter, and that wrong ones are seen."""
