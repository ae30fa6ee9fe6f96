# make demo: from nothing to a measured speedup. make test: everything that must hold before a commit.
# PYTHON=python3.12 chooses the interpreter; TORCH_INDEX= (empty) takes torch from pip's own index, with CUDA.

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ENV := .venv
RUN := $(ENV)/bin/python
STAMP := $(ENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup fetch demo test engines lint format types clean

help:
	@echo "make demo    prepare, distill and measure a draft for the embedded target (about 20 minutes on 2 cores with AMX)"
	@echo "make test    lint, format check, type check and tests"
	@echo "make setup   .venv with everything installed        make fetch   the embedded target and traffic"
	@echo "make lint | format | types                          make clean   caches (keeps artifacts/ and runs/)"
	@echo "make engines serving engines for scripts.serve_check, each in its own environment (ENGINES=vllm: that one alone)"

setup: $(STAMP)

# torch goes first and alone: only it is looked for in the second index, where its CPU build lies.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Leadout needs Python 3.11 or newer and \
	$(PYTHON) is %d.%d: run make PYTHON=/path/to/a/newer/python." % sys.version_info[:2])'
	test -x $(RUN) || $(PYTHON) -m venv $(ENV)
	$(RUN) -m pip install --no-deps -c constraints.txt --retries 1 --timeout 15 \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(RUN) -m pip install -c constraints.txt -e '.[dev]'
	touch $@

fetch: setup
	$(RUN) -m scripts.fetch_embedded

demo: setup
	$(RUN) -m scripts.demo $(ARGS)

test: fetch lint types
	OMP_NUM_THREADS=1 $(RUN) -m pytest  # tiny tensors: more threads only wait for each other

# Only scripts.serve_check needs them: gigabytes, and packages that do not fit beside ours.
engines: setup
	TORCH_INDEX=$(TORCH_INDEX) $(RUN) -m scripts.engines $(ENGINES)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: setup
	$(ENV)/bin/basedpyright

clean:
	rm -rf .pytest_cache .ruff_cache *.egg-info build
	find . -name __pycache__ -not -path './$(ENV)/*' -prune -exec rm -rf {} +
