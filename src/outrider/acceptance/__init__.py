"""What is kept of a draft, and what is drawn in place of the rest: the exact rule, others to compare with, lenience."""
