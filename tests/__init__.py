"""Tests. What they import stays, and looking for garbage meanwhile takes two seconds of each process (`conftest`)."""

import gc

gc.disable()
