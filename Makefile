# One command each on a machine that has only Python >= 3.11, pip and make. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/pip --disable-pip-version-check
RUN = $(VENV)/bin/python
CONFIG ?= configs/tiny.yaml
EXTRAS ?= dev
SMOLLM2 ?= checkpoints/smollm2/target
comma = ,
# of these extras: others are installed on top when they are asked for
INSTALLED = $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
# Types and shapes are checked at every call, which makes a test three times as slow.
CHECKED = --jaxtyping-packages=store,lm,heads,data_gen,decode,evaluation,papers,serve,checkpoints,beartype.beartype

SMOLLM2_HEAD = head:checkpoints/smollm2/heads/drawn+s-d0-w1
SMOLLM2_SETTINGS = --config smollm2 --pair.target.path $(SMOLLM2) --data.prompts checkpoints/smollm2/prompts.jsonl \
	--data.num_train null --data.num_dev 8 --data.num_test 16 --decode.num_dev 8 --decode.num_test 16 --decode.dir runs/smollm2

.PHONY: help install demo smollm2 test test-all check conformance test-vllm docs outputs pictures tree clean
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/'

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

smollm2: $(INSTALLED) ## a published model, SmolLM2-135M: an answer in colour, a short race on a clock (ten minutes; SMOLLM2=DIR if it is here)
	test -f $(SMOLLM2)/config.json || $(RUN) -m checkpoints.recipes smollm2 --dir $(SMOLLM2)
	$(RUN) -m decode generate $(SMOLLM2_SETTINGS) --policy $(SMOLLM2_HEAD) --max_new_tokens 80 --prompt "What causes the tides?"
	$(RUN) -m evaluation bench $(SMOLLM2_SETTINGS) --samplings '[own]' --num_prompts 8 --num_tokens 64 --race.ignore_eos false \
		--policies '[fixed_length:k=2,cumulative_token_prob:min_token_prob=0.38,$(SMOLLM2_HEAD)]'

test: $(INSTALLED) ## the fast tests, every law among them (five minutes; so does a bare `pytest`)
	$(RUN) -m pytest -n 2 --dist worksteal

test-all: $(INSTALLED) ## every test, with types and shapes checked at every call: what CI runs (the better part of an hour)
	$(RUN) -m pytest -n 2 --dist worksteal -m '' $(CHECKED)

check: $(INSTALLED) ## ruff, formatting, types, the fast tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -n 2 --dist worksteal

conformance: $(INSTALLED) ## the table of model families that are exact
	$(RUN) -m tests.conformance

test-vllm: $(INSTALLED) ## the plugin in a real vLLM, in the environment of VLLM_PYTHON, beside our loop (minutes)
	$(RUN) -m pytest -m "" tests/serve/vllm/engine.py tests/serve/vllm/server.py

docs: $(INSTALLED) ## the site, into site/: pages, every option, the Python API
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --site-dir site
	@echo "open site/index.html, or serve it: python3 -m http.server --directory site"

outputs: $(INSTALLED) ## run the commands whose output the docs quote, and write it into the pages (ten minutes)
	$(RUN) -m docs.outputs

pictures: $(INSTALLED) ## the pictures of the docs, into docs/pictures; needs Chromium
	$(RUN) docs/pictures.py

tree: $(INSTALLED) ## the rooms, one line per file
	@$(RUN) -m tests.layout

clean: ## remove what was installed and made (runs, data), keep the embedded trio
	rm -rf $(VENV) data runs site checkpoints/runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
