# Two commands on a fresh machine: make quickstart, make test. Everything lives in .venv.
PYTHON ?= python3
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test test-slow test-lowest check format clean

quickstart: .venv/packages
	finetune launch --config fsdp_full_shard.yaml

test: .venv/installed
	python -m pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-slow: .venv/installed
	python -m pytest -m slow

# The lowest versions that pyproject.toml admits; of torch the one that has a CPU build at hand. LOWEST_TORCH=2.11.0
# has none: its build for CUDA, 3 GB with its libraries, runs on a CPU too.
LOWEST_TORCH ?= 2.13.0
test-lowest:
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python tests/lowest_versions.py torch==$(LOWEST_TORCH) > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --editable ".[quantized]" pytest pytest-timeout hypothesis --constraint .venv-lowest/constraints.txt
	PATH=$(CURDIR)/.venv-lowest/bin:$$PATH python -m pytest -m "not slow" \
	  tests/test_quickstart.py tests/training/test_same_losses.py tests/checkpoint/test_resume.py tests/export/test_lora_merge.py \
	  tests/training/test_experts.py tests/training/test_published_bases.py tests/models/test_layers.py

check: .venv/installed
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format: .venv/installed
	ruff check --fix .
	ruff format .

# What training needs, then what the tests need. Python compiles what it imports: pip would compile 12,000 files.
# A mark is made last, so that an install that broke off is done again.
.venv/packages: pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	python -m pip install --quiet --no-compile --editable . --constraint constraints.txt
	touch $@

.venv/installed: .venv/packages
	python -m pip install --quiet --editable ".[dev]" --constraint constraints.txt
	touch $@

clean:
	rm -rf .venv .venv-lowest runs build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
