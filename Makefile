# `make demo` runs the main example, `make test` the tests; both first make .venv and install what they need into it.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
BROWSER := $(VENV)/.chromium-found
IMAGE_VENV := .venv-timm
IMAGE_DEV := $(IMAGE_VENV)/.installed
# One more process than cores of the machines that this is measured on: tests of several ranks mostly wait.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

# Each of the processes that tests start would otherwise compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
GPU_FOUND := gpu-found

.PHONY: help install demo test sweep lint format bench gpu $(GPU_FOUND) docs notebooks clean

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON ($(PYTHON)) is what .venv is made with; TORCH ($(TORCH)) is what pip installs first,"
	@echo "empty for any version that pyproject.toml allows; VENV_FLAGS=--system-site-packages uses packages that"
	@echo "PYTHON already has, such as a torch with CUDA. They act when .venv is made: make clean first to change them."

install: $(DEV) ## install graphopt from this folder, and everything for tests and lint, into .venv

demo: $(CORE) ## train a small GPT on real text within a third of the bytes that it takes (about a minute)
	$(BIN)/python examples/fit_gpt.py

test: $(DEV) $(BROWSER) ## run the tests (a quarter of an hour on two cores)
	$(PYTEST)

sweep: ## run what `make test` leaves out (hours); PARTS="models timm" runs these of .ci/sweep
	.ci/sweep $(PARTS)

lint: $(DEV) ## check style, types, and which way imports run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(DEV) ## rewrite the sources in the agreed style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) $(BROWSER) ## measure what tests/benchmarks/README.md says (an hour and a half)
	$(BIN)/python tests/benchmarks/recompute.py
	$(BIN)/python tests/benchmarks/step_frontier.py
	$(BIN)/python tests/benchmarks/mixed_precision.py
	$(BIN)/python tests/benchmarks/capture_scaling.py
	$(BIN)/python tests/benchmarks/border.py
	$(BIN)/python tests/benchmarks/lengths.py
	$(BIN)/python tests/benchmarks/offload_state.py
	$(BIN)/python tests/benchmarks/shard_parameters.py
	$(BIN)/python tests/benchmarks/call_overhead.py
	$(BIN)/python tests/benchmarks/first_step.py
	$(BIN)/python tests/benchmarks/later_calls.py
	$(BIN)/python tests/benchmarks/large_models.py
	$(BIN)/python tests/benchmarks/predictions.py
	$(BIN)/python tests/benchmarks/chunk_loss.py
	$(BIN)/python tests/benchmarks/chunk_modules.py
	$(BIN)/python tests/benchmarks/compress_activations.py
	$(BIN)/python tests/benchmarks/microbatch.py
	$(BIN)/python tests/benchmarks/memory_frontier.py --models gpt --inductor
	$(BIN)/python tests/benchmarks/compile_backend.py
	$(BIN)/python tests/benchmarks/bert_large_a100.py
	$(BIN)/python tests/benchmarks/exchange.py
	$(BIN)/python tests/benchmarks/selection.py
	$(BIN)/python tests/benchmarks/convergence.py --tasks digits --rate 100mbit
	$(BIN)/python tests/benchmarks/convergence.py --tasks text --ways dense DGC
	$(BIN)/python tests/benchmarks/page.py
	$(BIN)/python tests/benchmarks/planner.py --graphs 100
	$(BIN)/python tests/benchmarks/one_budget.py --budgets 8

gpu: $(GPU_FOUND) $(DEV) ## run the tests that need a GPU, and measure there: one table, build/gpu/gpu.txt
	@status=0; $(BIN)/python -m pytest -m gpu || status=1; \
	$(BIN)/python tests/benchmarks/gpu.py || status=1; exit $$status

$(GPU_FOUND):
	@nvidia-smi -L 2>/dev/null | grep -q GPU \
		|| { echo "make gpu needs a machine with an NVIDIA GPU, and nvidia-smi finds none here: nothing was run"; exit 1; }

docs: $(DEV) ## build the reference, to be read and searched without a network: build/docs/index.html
	$(BIN)/python -m tests.support.documentation.site build/docs

notebooks: $(DEV) ## execute the notebooks and store their outputs (about two minutes)
	$(BIN)/python -m tests.support.notebooks

clean: ## remove .venv, caches and everything else that make made; runs/ stays
	rm -rf $(VENV) $(IMAGE_VENV) build dist .import_linter_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find graphopt passes tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its exact version: pip would otherwise take the newest build that pyproject.toml allows.
$(CORE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "graphopt needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV_FLAGS) $(VENV)
	@echo "Installing $(TORCH) and graphopt into $(VENV): minutes on the first run, seconds later"
	@$(if $(strip $(TORCH)),$(PIP) install '$(TORCH)')
	@$(PIP) install --editable .
	@touch $@

$(DEV): $(CORE)
	@echo "Installing what tests and lint need into $(VENV)"
	@$(PIP) install --editable '.[dev]'
	@touch $@

# timm needs torchvision, which fits the torch that it was built for: its models have an environment of their own.
$(IMAGE_DEV): pyproject.toml
	@$(PYTHON) -m venv --clear $(IMAGE_VENV)
	@echo "Installing timm with its own torch into $(IMAGE_VENV)"
	@$(IMAGE_VENV)/bin/python -m pip --quiet --disable-pip-version-check --no-input install torch==2.14.1 torchvision==0.29.1
	@$(IMAGE_VENV)/bin/python -m pip --quiet --disable-pip-version-check --no-input install --editable '.[test]' timm
	@touch $@

# The tests of the interactive page drive a headless chromium, which pip does not install.
APT := apt-get -qq -o Dpkg::Use-Pty=0
CHROMIUM := install -y --no-install-recommends chromium
$(BROWSER): $(CORE)
	@command -v chromium >/dev/null \
		|| { echo "Installing a program outside of $(VENV), by apt-get: Debian's chromium, for the tests of the interactive page" \
			&& { $(APT) $(CHROMIUM) >/dev/null 2>&1 || { $(APT) update && $(APT) $(CHROMIUM) >/dev/null; }; } \
			&& command -v chromium >/dev/null; } \
		|| { echo "The tests of the interactive page need a program called chromium, and apt-get cannot install it here:"; \
			echo "install it as root (Debian: apt-get install chromium), and run make test again."; exit 1; }
	@touch $@
