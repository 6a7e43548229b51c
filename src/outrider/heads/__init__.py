"""Draft heads: small networks on the target's last hidden state. What they are; `drafters.head` drafts with them."""
