"""Who proposes tokens: a model, or the context itself."""

from outrider.drafters.base import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prompt_lookup import PromptLookupDrafter

__all__ = ["Drafter", "ModelDrafter", "PromptLookupDrafter"]
