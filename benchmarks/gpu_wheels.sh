#!/usr/bin/env bash
# Fetches what a GPU machine with torch 2.11, transformers, accelerate, peft and nothing of ours lacks, in the versions of
# constraints.txt: about 50 MB, for Python 3.12 on x86-64. With a network here and none there:
#   benchmarks/gpu_wheels.sh wheels                                                                   # here
#   python -m pip install --no-index --no-deps --target site wheels/*.whl; export PYTHONPATH=$PWD/site:$PWD   # there
# Unsloth takes an older TRL and datasets, so it has a folder of its own, which only its rows see:
#   benchmarks/gpu_wheels.sh unsloth-wheels unsloth                                                   # here
#   python -m pip install --no-index --no-deps --target unsloth unsloth-wheels/*.whl                          # there
#   python benchmarks/gpu.py --only Unsloth --unsloth-packages unsloth
set -euo pipefail
folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER [unsloth]}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${2:-ours}" = unsloth ]; then
  packages=(
    unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 "datasets==4.8.*" xformers==0.0.35 cut_cross_entropy einops
    diffusers tyro docstring-parser typeguard shtab hf_transfer nest-asyncio json5 structlog sentencepiece protobuf msgspec
    bitsandbytes torchao pyarrow multiprocess dill xxhash
  )
else
  packages=(
    peft datasets multiprocess dill xxhash pydantic pydantic-core annotated-types typing-inspection bitsandbytes torchao
    pytest pytest-timeout pluggy iniconfig pygments hypothesis sortedcontainers --constraint constraints.txt
  )
fi
platforms=()
for glibc in 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" "${packages[@]}"
du -ch "$folder"/*.whl | tail -1
