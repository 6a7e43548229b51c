"""What a model's weights become when it is loaded: read from GGUF, packed, quantized, laid side by side, kept on disk."""
