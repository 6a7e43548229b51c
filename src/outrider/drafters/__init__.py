"""Who proposes tokens: a model, the context itself, tables, the target's own layers, or another speculative decoder.

Beside the drafters, what one of a user's own is written with (docs/writing-a-drafter.md).
"""

from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.choice import ChoiceDrafter
from outrider.drafters.early_exit import EarlyExitDrafter
from outrider.drafters.head import HeadDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.other_tokenizer import IntersectionDrafter, TextDrafter
from outrider.drafters.prompt_lookup import PromptLookupDrafter
from outrider.drafters.random_tokens import RandomDrafter
from outrider.drafters.self_draft import SelfDrafter
from outrider.drafters.speculative import SpeculativeDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.proposal import DraftRow, Proposal, padded_proposal

__all__ = [
    "ChoiceDrafter",
    "DraftContext",
    "DraftRow",
    "Drafter",
    "EarlyExitDrafter",
    "HeadDrafter",
    "IntersectionDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Plan",
    "PromptLookupDrafter",
    "Proposal",
    "Prospect",
    "RandomDrafter",
    "SelfDrafter",
    "SpeculativeDrafter",
    "SuffixDrafter",
    "TextDrafter",
    "padded_proposal",
]
