"""What a model's weights become when it is loaded: read from GGUF, packed, rounded, laid side by side, kept on disk."""
