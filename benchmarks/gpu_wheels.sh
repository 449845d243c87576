#!/usr/bin/env bash
# Fetches what a GPU machine with torch 2.11, transformers, accelerate, peft and nothing of ours lacks, in the versions of
# constraints.txt: about 50 MB, for Python 3.12 on x86-64. With a network here and none there:
#   benchmarks/gpu_wheels.sh wheels                                                                   # here
#   python -m pip install --no-index --no-deps --target site wheels/*.whl; export PYTHONPATH=$PWD/site:$PWD   # there
set -euo pipefail
folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
platforms=()
for glibc in 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 --constraint constraints.txt --dest "$folder" \
  peft datasets multiprocess dill xxhash pydantic pydantic-core annotated-types typing-inspection bitsandbytes torchao \
  pytest pytest-timeout pluggy iniconfig pygments hypothesis sortedcontainers
du -ch "$folder"/*.whl | tail -1
