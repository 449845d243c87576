"""A published file, converted, as a run of two steps on this machine: a tiny model of its family, small rows of its format."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.config.families import find_family
from finetune.config.methods import METHODS
from finetune.config.quantization import SCHEMES
from finetune.config.reader import shipped_folder
from finetune.convert.conversion import convert_file
from finetune.convert.model_names import guess_family, is_mixture
from finetune.convert.value_conversion import Conversion
from finetune.errors import UserError
from tests.conftest import make_tokenizer
from tests.models.families import build
from tests.models.sweep import tiny_config
from tests.ranks import ROOT, launch_ranks
from tests.vision import PROCESSORS, WITH_TOWER_ALONE, add_processor, draw_image, make_vision_model

ROWS = 12
MORE_TOKENS = 8  # that files name beside those of TURNS
# What needs a GPU, a compiler that takes minutes, more than one process or the network.
HERE: dict[str, Any] = {
    "max_steps": 2,
    "global_batch_size": 2,
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
    "export_at_end": False,
    "torch_compile": False,
    "use_liger_kernel": False,
    "activation_offload": False,
    "tf32": False,
    "report_to": "none",
    "dataset_num_proc": 1,
    "expert_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
# Tokens of turns that published models' tokenizers have, by their names.
TURNS = {
    r"qwen|smollm|hermes|lfm2": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    r"llama-?3": (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
    ),
    r"gemma-?4": ("<|turn>", "<turn|>"),
    r"gemma-?[^4]": ("<start_of_turn>", "<end_of_turn>"),
    r"phi-?[34]": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SMALL: dict[str, dict[str, Any]] = {  # sizes of families that others of their own make small
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"), MIXTURE),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        LATENT | ROUTED | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    ),
    "glm4_moe": ROUTED | {"first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT
    | ROUTED
    | {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1},
    "lfm2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "granitemoehybrid": MIXTURE
    | {"mamba_n_heads": 6, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
}
SWEPT = (
    "afmoe",
    "bailing_hybrid",
    "beam",
    "cohere2_moe",
    "dbrx",
    "dots1",
    "ernie4_5_moe",
    "flex_olmo",
    "gemma4_unified_text",
    "glm_moe_dsa",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "jamba",
    "kimi_linear",
    "llama4_text",
    "mimo_v2_flash",
    "minimax_m2",
    "nemotron_h",
    "phimoe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
    "solar_open",
)  # small as in the sweep
UNREADABLE = (
    "gradient_accumulation_steps",
    "warmup_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "dataset_cache_dir",
)


@dataclass(frozen=True)
class Trial:
    """A file that converts: what the conversion says, and the recipe to start in its stead."""

    file: Path
    found: Conversion
    recipe: Path

    @property
    def tool(self) -> str:
        return self.file.parent.name


def list_trials(folder: Path, into: Path) -> Iterator[Trial]:
    """A trial for each file under FOLDER/tool/ that converts; recipes, models and rows are written under `into`."""
    for file in sorted(path for path in folder.glob("*/*") if path.suffix in (".yaml", ".yml")):
        if file.parent.name == "accelerate_files":
            continue
        try:
            found = convert_file(file)
        except UserError:
            continue
        yield make_trial(file, found, into)


def make_trial(file: Path, found: Conversion, into: Path) -> Trial:
    """The recipe of a converted file, its model, rows and Accelerate file replaced by small ones of the same kind, in fp32."""
    place = into / file.parent.name / file.stem
    place.mkdir(parents=True)
    name = str(found.recipe["model_name_or_path"])
    recipe = {key: value for key, value in found.recipe.items() if key not in UNREADABLE} | HERE
    recipe |= {
        "model_name_or_path": str(make_tiny(name, into, found.image_family, _name_tokens(recipe))),
        "output_dir": str(place / "run"),
    }
    recipe.pop("tokenizer_name_or_path", None)
    if recipe.get("teacher_model_name_or_path"):
        recipe["teacher_model_name_or_path"] = recipe["model_name_or_path"]
    if str(recipe.get("attn_implementation")).startswith("fl"):
        without_sdpa = find_family(guess_family(name) or "").caps_scores
        recipe["attn_implementation"] = (
            "auto" if recipe.get("packing", True) or without_sdpa else "sdpa"
        )
    if recipe.get("adapter_name_or_path"):
        del recipe["adapter_name_or_path"]
    if recipe.get("optim_in_backward"):
        recipe["global_batch_size"] = 1
    if recipe.get("qat_group_size"):  # that divides the small model's widths, where it is free
        scheme = SCHEMES[recipe["quantization_aware_training"]]
        recipe["qat_group_size"] = scheme.group_of(8)
    if METHODS[recipe.get("method", "sft")].samples:  # the model itself, without the file's rewards
        for key in ("vllm_server_base_url", "max_staleness"):
            recipe.pop(key, None)
        recipe |= {"rewards": ["length"], "num_generations": 2, "max_completion_length": 8}
    if "trainable_modules" in recipe:  # a layer that the small model has
        recipe["trainable_modules"] = [
            re.sub(r"layers\.[^.]+", "layers.1", name) for name in recipe["trainable_modules"]
        ]
    if isinstance(recipe.get("mask_token"), int):  # of the published vocabulary
        recipe["mask_token"] = 1
    if "eval_split_size" in recipe:
        recipe["eval_split_size"] = 2
    rows = METHODS[recipe.get("method", "sft")].rows
    for key in ("datasets", "eval_datasets"):
        if key in recipe:
            entries = enumerate(recipe[key])
            recipe[key] = [
                write_rows(entry, rows, place / f"{key}{number}.jsonl") for number, entry in entries
            ]
            if found.image_family in PROCESSORS:
                add_pictures(recipe[key])
    if "accelerate_config" in recipe:
        recipe["accelerate_config"] = str(write_layout(str(recipe["accelerate_config"]), place))
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True))
    return Trial(file, found, path)


def _name_tokens(recipe: dict[str, Any]) -> list[str]:
    """The recipe's tokens that the published tokenizer has; where GLM's generation stops becomes one of `eot_tokens`."""
    if str(recipe.get("chat_template")).startswith("glm4."):
        recipe["eot_tokens"] = ["<|user|>"]  # of the published generation_config.json
    named = [*(recipe.get("eot_tokens") or []), *(recipe.get("special_tokens") or {}).values()]
    return [token for token in named if token not in recipe.get("added_tokens", [])]


def make_tiny(name: str, into: Path, images: str | None = None, ends: Sequence[str] = ()) -> Path:
    """A model of two layers with random weights, of the family that `name` says, and a tokenizer of bytes with its turns.

    `ends`: tokens at the ends of turns, which the published tokenizer has.
    """
    family, tokenizer = guess_family(name) or "llama", make_tokenizer()
    if images in PROCESSORS or family in WITH_TOWER_ALONE:
        kind = WITH_TOWER_ALONE.get(family, str(images))
        whole = into / "models" / kind
        if not whole.exists():
            make_vision_model(whole, kind)
            if kind in PROCESSORS:
                add_processor(whole, kind)
        return add_ends(whole, ends)
    turns = [
        token
        for pattern, tokens in TURNS.items()
        if re.search(pattern, name.lower())
        for token in tokens
    ]
    folder = into / "models" / f"{family}{len(turns)}{'-mixture' * is_mixture(name)}"
    if not folder.exists():
        tokenizer.add_special_tokens({"additional_special_tokens": turns})
        rows = len(tokenizer) + MORE_TOKENS
        sizes = {"vocab_size": rows, "initializer_range": 0.02}
        sizes |= (
            {"vocab_size_per_layer_input": rows}
            if family in ("gemma3n_text", "gemma4_text")
            else {}
        )
        sizes |= SMALL.get(family, {})
        if family == "gemma4_text" and is_mixture(name):
            sizes |= {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 64,
            }
        model = build_swept(family, **sizes) if family in SWEPT else build(family, **sizes)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return add_ends(folder, ends)


def add_ends(folder: Path, ends: Sequence[str]) -> Path:
    """Names tokens that are not in the tokenizer; the embeddings have rows for some more."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.add_special_tokens(
        {"additional_special_tokens": list(ends)}, replace_extra_special_tokens=False
    ):
        tokenizer.save_pretrained(folder)
    return folder


def build_swept(family: str, **sizes: Any) -> Any:
    """As `build`, with the sizes of tests/models/sweep.py."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    for key, value in sizes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config)


def write_layout(name: str, place: Path) -> Path:
    """The shipped Accelerate file for one process in fp32."""
    layout = yaml.safe_load((shipped_folder("accelerate_configs") / f"{name}.yaml").read_text())
    layout.pop("parallelism_config", None)
    path = place / "accelerate.yaml"
    path.write_text(yaml.safe_dump(layout | {"mixed_precision": "no", "use_cpu": True}))
    return path


def write_rows(entry: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    """Rows with the columns that the entry names, else those that its type is recognized by; its entry without the hub's keys."""
    rows = [make_row(entry, kind, number) for number in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {key: value for key, value in entry.items() if key not in ("name", "split", "path")} | {
        "path": str(path)
    }


def add_pictures(entries: list[dict[str, Any]]) -> None:
    """Gives each row of messages a picture, as TRL's and LLaVA's data sets have it: in the column images."""
    for entry in entries:
        path = Path(entry["path"])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        entry.pop("image_folder", None)
        for number, row in enumerate(rows):
            row["images"] = [draw_image(path.parent / f"{number}.png", number).name]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_row(entry: Mapping[str, Any], kind: str, number: int) -> dict[str, Any]:
    """One row as the data set of that entry has it."""

    def column(name: str) -> str:
        return str(entry.get(f"{name}_column") or name)

    question, answer = f"What is {number} and one?", f"It is {number + 1}."
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    is_text = entry.get("type") == "messages"
    if kind in ("pairs", "scored_pairs"):
        worse = "No idea." if is_text else [{"role": "assistant", "content": "No idea."}]
        better = answer if is_text else chat[1:]
        return {
            column("prompt"): question if is_text else chat[:1],
            column("chosen"): better,
            column("rejected"): worse,
        }
    if kind == "ratings" and is_text:
        return {
            column("prompt"): question,
            column("completion"): answer,
            column("label"): number % 2 == 0,
        }
    if kind == "ratings":
        return {
            column("prompt"): chat[:1],
            column("completion"): chat[1:],
            column("label"): number % 2 == 0,
        }
    match entry.get("type"):
        case "alpaca":
            names = (
                str(entry.get("prompt_column") or "instruction"),
                str(entry.get("completion_column") or "output"),
            )
            return {names[0]: question, "input": "", names[1]: answer}
        case "sharegpt":
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            return {str(entry.get("messages_column") or "conversations"): turns}
        case "squad":
            return {
                "context": "Numbers.",
                "question": question,
                "answers": {"text": [answer], "answer_start": [0]},
            }
        case "hellaswag":
            return {"ctx": question, "endings": [answer, "No."], "label": "0"}
        case "cauldron":
            return {"texts": [{"user": question, "assistant": answer}]}
        case "text":
            return {column("text"): f"{question} {answer}"}
        case _ if "prompt_column" in entry or "completion_column" in entry:
            return {column("prompt"): question, column("completion"): answer}
        case _:
            return {column("messages"): chat}


def start(trial: Trial) -> tuple[bool, str]:
    """(whether the trial trained, what it printed)."""
    finished = launch_ranks(
        ROOT / "finetune" / "run.py", ["--recipe", str(trial.recipe)], ranks=1, timeout=300
    )
    return finished.returncodes == (0,), finished.outputs[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        trials = list_trials(Path(sys.argv[1]), Path(place))
        print(
            json.dumps(
                {f"{trial.tool}/{trial.file.name}": start(trial)[0] for trial in trials}, indent=1
            )
        )
