# Two commands on a fresh machine: make quickstart, make test. Everything lives in .venv.
PYTHON ?= python3
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: quickstart test test-slow check format clean

quickstart: .venv/installed
	accelerate launch finetune/run.py --config fsdp_full_shard.yaml

test: .venv/installed
	python -m pytest -m "not slow"

test-slow: .venv/installed
	python -m pytest -m slow

check: .venv/installed
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format: .venv/installed
	ruff check --fix .
	ruff format .

# The mark is made last, so that an install that broke off is done again.
.venv/installed: pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	python -m pip install --quiet --editable ".[dev]" --constraint constraints.txt
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
