"""Engines and what they load: layers, precisions, encoder–decoders, OpenVINO, llama.cpp."""
