"""Engines behind one contract (`base`): transformers (encoder–decoders, too), OpenVINO, llama.cpp, written-down tables."""
