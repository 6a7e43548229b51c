"""The llama.cpp engine: GGUF files as they are, quantised weights kept quantised."""
