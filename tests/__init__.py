"""Tests. What they import stays, and looking for garbage meanwhile takes two seconds of each process (`fixtures`)."""

import gc

gc.disable()
