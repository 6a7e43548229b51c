"""Many prompts: a file of them through one continuous batch, in this process or in several (Ray)."""

from outrider.batch.continuous import ContinuousBatch
from outrider.batch.jobs import Job
from outrider.batch.journal import Journal
from outrider.batch.setup import Ready, Setup

__all__ = ["ContinuousBatch", "Job", "Journal", "Ready", "Setup"]
