# Two commands for a new user: `make demo` and `make test`. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export MPLBACKEND := Agg

.PHONY: install test lint types imports pytest demo bench clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tensorboard]'
	touch $(STAMP)

test: lint types imports pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/basedpyright

imports: install
	$(BIN)/lint-imports

pytest: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

demo: install
	$(BIN)/xorflow train --out runs/demo

clean:
	rm -rf $(VENV) build dist runs
