# Two commands on a fresh machine: make quickstart, make test. Everything lives in .venv.
PYTHON ?= python3
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test test-slow test-gpu test-lowest test-newest test-wheel site check format clean

quickstart: .venv/packages
	finetune launch --config fsdp_full_shard.yaml

test: .venv/installed
	python -m pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder

# SLOW_TESTS: a part of them.
SLOW_TESTS ?= tests
test-slow: .venv/installed
	python -m pytest -m slow $(SLOW_TESTS)

test-gpu: .venv/installed
	python -m pytest -m gpu

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

# The newest versions on the index that pyproject.toml admits, without constraints.txt, and the quick suite; of torch the
# newest that has a CPU build at hand. NEWEST_TORCH=torch takes the index's own, whose build for CUDA is 3 GB with its libraries.
NEWEST_TORCH ?= torch==2.13.0
NEWEST ?= $(NEWEST_TORCH) transformers accelerate peft datasets
test-newest:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --editable ".[dev]" $(NEWEST) --upgrade --upgrade-strategy eager
	.venv-newest/bin/python -m pip list | grep -E "^(torch|transformers|accelerate|peft|datasets) "
	PATH=$(CURDIR)/.venv-newest/bin:$$PATH python -m pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The wheel as its users have it: installed into a new environment, and tried from another folder.
test-wheel:
	rm -rf .venv-wheel build
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir .venv-wheel/dist .
	.venv-wheel/bin/python -m pip install --quiet .venv-wheel/dist/finetune_exact-*.whl
	.venv-wheel/bin/python tests/try_wheel.py .venv-wheel/bin/finetune

# The documentation site, in build/site; a warning is an error. mkdocs itself advertises its successor above all else.
site:
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['docs'])")
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

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
	rm -rf .venv .venv-lowest .venv-newest .venv-wheel .venv-site runs build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
