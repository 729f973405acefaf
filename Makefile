# One command each on a machine that has only Python >= 3.11, pip and make. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/pip --disable-pip-version-check
RUN = $(VENV)/bin/python
CONFIG ?= configs/tiny.yaml
EXTRAS ?= dev
BACKEND ?= aot_eager
INSTALLED = $(VENV)/.installed
# Types and shapes are checked at every call, which makes a test three times as dear.
CHECKED = --jaxtyping-packages=store,lm,heads,data_gen,decode,evaluation,serve,checkpoints,beartype.beartype

.PHONY: help install demo test test-all check conformance test-vllm docs tree clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

install: $(INSTALLED) ## create .venv and install everything into it, versions as in constraints.txt

# torch first and by exact version: a looser requirement can pull in gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two"
	$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(INSTALLED)

demo: $(INSTALLED) ## the main job on the embedded trio: data, a sweep of 60 heads, export, evaluation (resumes what is there)
	$(RUN) -m data_gen --config $(CONFIG)
	$(RUN) train.py --config $(CONFIG)
	$(RUN) -m heads export --config $(CONFIG)
	$(RUN) -m evaluation evaluate --config $(CONFIG)

test: $(INSTALLED) ## the fast tests, every law among them (three minutes; so does a bare `pytest`)
	$(RUN) -m pytest -n 2

test-all: $(INSTALLED) ## every test, with types and shapes checked at every call: what CI runs (a quarter of an hour)
	$(RUN) -m pytest -n 2 -m '' $(CHECKED)

check: $(INSTALLED) ## ruff, formatting, types, the fast tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -n 2

conformance: $(INSTALLED) ## the table of model families that are exact, eager and compiled (BACKEND=inductor: hours)
	$(RUN) -m tests.conformance --backend $(BACKEND)

test-vllm: $(INSTALLED) ## the plugin in a real vLLM, in the environment of VLLM_PYTHON, beside our loop (minutes)
	$(RUN) -m benchmarks.serve

docs: $(INSTALLED) ## the site, into site/: pages, every option, the Python API
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --site-dir site
	@echo "open site/index.html, or serve it: python3 -m http.server --directory site"

tree: $(INSTALLED) ## the rooms, one line per file
	@$(RUN) -m tests.layout

clean: ## remove what was installed and made (runs, data), keep the embedded trio
	rm -rf $(VENV) data runs site checkpoints/runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
