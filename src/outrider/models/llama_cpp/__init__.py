"""The llama.cpp engine: GGUF files as they are, quantized weights kept quantized."""
