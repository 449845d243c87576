#!/usr/bin/env bash
# The first half hour on a GPU, in order of value: parts of at most ten minutes each. What a part has measured is on
# disk at every moment, so that one that is cut off has lost nothing but its last row.
#   benchmarks/gpu_first_half_hour.sh 1 OUTPUT    # versions, the tests marked gpu, the quickstart, a kill and its resume
#   benchmarks/gpu_first_half_hour.sh 2 OUTPUT    # the cases with a goal: 1B full, 8B LoRA, 8B full at 8,192
#   benchmarks/gpu_first_half_hour.sh 3 OUTPUT    # 70B QLoRA, 30B-A3B LoRA, DPO, FP8, a profile
#   UNSLOTH=FOLDER benchmarks/gpu_first_half_hour.sh 4 OUTPUT    # Unsloth beside ours; FOLDER: see gpu_wheels.sh
# SMOKE=1: at sizes that a CPU runs, to see that every command is right.
set -uo pipefail # a command that fails is said, and the next one runs
part=${1:?usage: benchmarks/gpu_first_half_hour.sh 1|2|3|4 OUTPUT} output=$(mkdir -p "${2:?OUTPUT}" && cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
smoke=${SMOKE:+--smoke}

say() { printf '%s %s\n' "$(date +%T)" "$*" | tee -a "$output/part$part.log"; }

# A title, seconds, and a command: its output to a file, its exit code and last line to the log.
try() {
  local title=$1 seconds=$2 file="$output/${1// /_}.txt"
  shift 2
  timeout $((seconds * (${SMOKE:-0} * 4 + 1))) bash -c '"$@"' try "$@" >"$file" 2>&1
  local code=$?
  say "$title: exit code $code: $(tail -n 1 "$file" | cut -c1-200)"
  return $code
}

quickstart() { # folder, then keys
  local folder=$1
  shift
  python -m finetune launch --recipe quickstart output_dir="$output/$folder" exact_match_samples=0 ${SMOKE:+max_steps=40} "$@"
}

measure() { # a folder, then the cases
  local folder=$1
  shift
  timeout 600 python benchmarks/gpu.py --without-others $smoke --output "$output/$folder" --cases "$@" \
    2>>"$output/$folder.log" | tee -a "$output/part$part.log"
}

killed_and_resumed() { # the same bits as a run that was never killed
  local keys=(deterministic=true max_steps=60 save_steps=20 export_at_end=true)
  quickstart whole "${keys[@]}" || return 1
  quickstart killed "${keys[@]}" &
  local run=$!
  until [ -d "$output/killed/checkpoints/step-00000040" ] || ! kill -0 $run; do sleep 0.05; done
  pkill -KILL -f "output_dir=$output/killed" # the launcher and its ranks at once
  if wait $run; then
    echo "it ended before it was killed"
    return 1
  fi
  quickstart killed "${keys[@]}" || return 1
  for file in "$output"/whole/export/*.safetensors; do
    cmp "$file" "$output/killed/export/$(basename "$file")" || return 1
  done
  echo "the same bits"
}

export -f quickstart killed_and_resumed
export output
case $part in
  1)
    try "versions" 60 python -c "import sys, torch, transformers, accelerate, peft, datasets, finetune
import torch.cuda as cuda
print(sys.version.split()[0], *(m.__version__ for m in (torch, transformers, accelerate, peft, datasets)), cuda.get_device_name() if cuda.is_available() else 'no GPU')"
    try "tests marked gpu" 240 python -m pytest -q -m gpu -p no:cacheprovider tests
    try "quickstart" 90 quickstart plain
    try "quickstart compiled" 120 quickstart compiled torch_compile=true
    try "killed and resumed" 120 killed_and_resumed
    ;;
  # What is still unknown comes first: since the last figures these have changed, or were never measured.
  2) measure unknown "8B LoRA r16, 32768" "8B QLoRA r16, 4096" "8B full, 8192" ;;
  3)
    measure rest "8B LoRA r16, 4096" "1B full, 4096" "30B-A3B LoRA" "8B DPO" FP8
    try "profile" 60 quickstart profiled max_steps=20 "profile_steps=[11, 13]"
    ;;
  4)
    timeout 570 python benchmarks/gpu.py $smoke --only Unsloth --unsloth-packages "${UNSLOTH:?its folder of packages}" \
      --output "$output/unsloth" --steps 8 --cases "1B full, 4096" "8B LoRA r16, 4096" "8B QLoRA r16, 4096" \
      2>>"$output/unsloth.log" | tee -a "$output/part$part.log"
    ;;
  *) echo "the parts are 1, 2, 3 and 4" >&2; exit 2 ;;
esac
