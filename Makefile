# The first Python that really runs and is new enough; a shim on PATH may do neither.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& echo $$python && exit; done; echo python3)

VENV := .venv
NOX := .venv-nox/bin/nox
# Twice quiet: errors only.
PIP := -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help demo test test-full bench-mlx prerequisites clean

help:
	@echo 'make demo       one answer from a worker on this machine, from nothing'
	@echo 'make test       what every change must pass: style, types, walls, unit tests, wheel, MLX'
	@echo 'make test-full  that, and the whole MLX lane on both mlx-lm releases, router included'
	@echo 'make bench-mlx  this worker against the published one'
	@echo 'make clean      remove what the above made here (not the model in your cache)'
	@echo 'PYTHON=...      which Python to use; SMG_PIP_ARGS=... extra arguments for pip install'

prerequisites:
	@$(PYTHON) scripts/prerequisites.py --install

# DEMO_ARGS: a question, or --keep to go on serving.
demo: $(VENV)/installed
	@$(VENV)/bin/python scripts/demo.py $(DEMO_ARGS)

test: $(NOX)
	@$(NOX)

test-full: $(NOX)
	@$(NOX)
	@$(NOX) --session full-mlx

bench-mlx: $(NOX)
	@$(NOX) --session bench-mlx

# Editable, so that the sources may change; only the requirements make it install again.
$(VENV)/installed: pyproject.toml | prerequisites
	@echo 'installing into $(VENV) (a minute or two, once)'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP) install $(SMG_PIP_ARGS) --editable '.[mlx,demo]'
	@touch $@

$(NOX): pyproject.toml | prerequisites
	@echo 'installing nox into .venv-nox'
	@$(PYTHON) -m venv .venv-nox
	@.venv-nox/bin/python $(PIP) install 'nox>=2025.2.9'
	@touch $@

clean:
	rm -rf .venv .venv-nox .nox build dist .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
