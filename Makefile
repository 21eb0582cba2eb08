# Two commands for a new user: `make demo` and `make test`. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed
ENGINES_VENV := .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.installed
OLD_VENV := .venv-oldest
export MPLBACKEND := Agg

.PHONY: install test test-cuda test-engines oldest lint types imports pytest demo docs bench attack soak clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tensorboard,trees]'
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

# seeded attacks on every door, and kills: `make attack MINUTES=20 KILLS=50`; a new seed each time, unless SEED= names one
MINUTES ?= 20
KILLS ?= 50
attack: install
	cd tests && $(CURDIR)/$(BIN)/python -m attack --minutes $(MINUTES) --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# half an hour of training, resuming, evaluating, sampling and scoring in one process, whose memory stays flat
soak: install
	cd tests && $(CURDIR)/$(BIN)/python -m attack --minutes 0 --soak $(if $(filter command line,$(origin MINUTES)),$(MINUTES),30)

# CUDA code without a GPU: kernels interpreted and compiled, captured steps on a stand-in; Triton is 198 MB, so it stays apart
$(CUDA_STAMP): pyproject.toml constraints.txt
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cuda-test]'
	touch $(CUDA_STAMP)

test-cuda: $(CUDA_STAMP)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -q tests/cuda

# Ray and Dask, with workers that are killed; both warn of themselves
$(ENGINES_STAMP): pyproject.toml constraints.txt
	test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[engines]'
	touch $(ENGINES_STAMP)

test-engines: $(ENGINES_STAMP)
	OMP_NUM_THREADS=1 $(ENGINES_VENV)/bin/python -m pytest -q tests/engines -W ignore::DeprecationWarning -W ignore::FutureWarning -W ignore::ResourceWarning

# the lower bounds of pyproject.toml, in an environment made anew each time: 8 GB, for torch of that time comes with CUDA. Packages of
# that time warn of what newer ones beside them will not have
oldest:
	rm -rf $(OLD_VENV)
	$(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	extras = project['optional-dependencies']; bounds = [*project['dependencies'], *extras['tensorboard'], *extras['trees'], *extras['sklearn']]; \
	print(*(bound.replace('>=', '==') for bound in bounds), sep='\n')" > $(OLD_VENV)/oldest.txt
	$(OLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OLD_VENV)/oldest.txt --editable '.[dev,tensorboard,trees]'
	OMP_NUM_THREADS=1 $(OLD_VENV)/bin/python -m pytest -q -n 2 -W ignore::DeprecationWarning

# a demo that was interrupted goes on; a finished one shows its summary again
demo: install
	$(BIN)/xorflow train --out runs/demo $(if $(wildcard runs/demo/config.json),--resume)

# tables in documents come from the records in research/results, and from the declarations of options
docs: install
	$(BIN)/python -m research docs
	$(BIN)/python -m docs.options

# speed of this machine, NAME=... names it: benchmarks/results, and docs/performance.md
bench: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/run.py $(if $(NAME),--name $(NAME))
	$(BIN)/python benchmarks/report.py

clean:
	rm -rf $(VENV) $(CUDA_VENV) $(ENGINES_VENV) $(OLD_VENV) build dist runs
