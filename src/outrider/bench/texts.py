"""Prompts of different kinds, to see where a draft pays and where it does not."""

from __future__ import annotations

from typing import Any

from outrider.bench.tasks import Task, human_eval
from outrider.errors import ParameterError
from outrider.models.base import TextModel, has_encoder

_SOURCE = '''class Account:
    """A bank account with a history of its transactions."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''

_ARTICLE = (
    "The city council voted on Tuesday to close the old harbour bridge to cars from the first of May. The bridge, built in "
    "1931, carries about nine thousand cars a day, and engineers found in January that two of its seven piers have moved by "
    "several centimetres. Buses and bicycles may still use it. The mayor said that a new bridge would cost at least forty "
    "million and could not be finished before 2031. Shop owners on the northern side fear for their trade and asked the "
    "council to open a ferry line in the meantime. The council will decide on the ferry in March."
)

_WORDS = (
    "lantern gravel soup eleven violin crooked pepper Tuesday marble whisper copper ladder oblong vinegar thimble glacier "
    "pocket nineteen saddle plum bracket harbour velvet onion magnet feather"
)


def chat(tokenizer: Any, text: str) -> str:
    """The text as a user's turn, if the model has a chat template; to be encoded as any text is."""
    if not getattr(tokenizer, "chat_template", None):
        return text
    messages = [{"role": "user", "content": text}]
    made = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    start = tokenizer.bos_token
    # Some templates write the beginning-of-sequence token that encoding puts there, too: once is enough.
    return made.removeprefix(start) if start and list(tokenizer.encode("")) == [tokenizer.bos_token_id] else made


_FINNISH = "Suomen kesä on lyhyt mutta valoisa. Juhannuksena perheet kokoontuvat mökille ja"

_REPETITION = "Monday: closed\nTuesday: closed\nWednesday: closed\nThursday: closed\n"


def kinds_for(target: TextModel) -> list[Task]:
    """One prompt of each kind, as this model is asked: the bare texts if it has an encoder, since it is made for a task."""
    if not has_encoder(target):
        return kinds(target.tokenizer)
    if getattr(target, "hears", False):
        raise ParameterError(
            f"{target.name} hears audio, and these texts are written: use bench tasks, sweep, alpha or lenience with --task "
            'jsonl:FILE, or peers or setups with --texts jsonl:FILE, a {"audio": FILE.wav} on each line'
        )
    return [
        Task("code", _SOURCE),
        Task("article", _ARTICLE),
        Task("question", "Why is the sky blue, and why are sunsets red?"),
        Task("random words", _WORDS),
        Task("Finnish", _FINNISH),
        Task("repetition", _REPETITION),
    ]


def kinds(tokenizer: Any) -> list[Task]:
    """One prompt of each kind; the instructions through the model's chat template."""
    return [
        Task("code completion", human_eval(0, 0)[0].prompt),
        Task(
            "code edit",
            chat(
                tokenizer, f"Rename `amount` to `value` and add type hints. Give the whole class.\n\n```python\n{_SOURCE}```"
            ),
        ),
        Task("summary", chat(tokenizer, f"Summarise this article in three sentences:\n\n{_ARTICLE}")),
        Task("chat", chat(tokenizer, "Why is the sky blue, and why are sunsets red? Explain it to a child.")),
        Task("random words", f"{_WORDS}"),
        Task("Finnish", _FINNISH),
        Task("repetition", _REPETITION),
    ]
