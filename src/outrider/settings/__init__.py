"""What a user may ask for, as plain data that is checked when it is made.

Nothing here imports torch, which takes seconds: what is wrong with an option is said before.
"""
