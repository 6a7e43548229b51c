"""The OpenVINO engine: converting a model once (`convert`), and running it (`engine`)."""
