"""Who proposes tokens: a model, the context itself, tables, the target's own layers, or another speculative decoder."""

from outrider.drafters.base import Drafter
from outrider.drafters.choice import ChoiceDrafter
from outrider.drafters.early_exit import EarlyExitDrafter
from outrider.drafters.head import HeadDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.other_tokenizer import IntersectionDrafter, TextDrafter
from outrider.drafters.own_model import SelfDrafter
from outrider.drafters.prompt_lookup import PromptLookupDrafter
from outrider.drafters.speculative import SpeculativeDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.uniform import RandomDrafter

__all__ = [
    "ChoiceDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "HeadDrafter",
    "IntersectionDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "PromptLookupDrafter",
    "RandomDrafter",
    "SelfDrafter",
    "SpeculativeDrafter",
    "SuffixDrafter",
    "TextDrafter",
]
