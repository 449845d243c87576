"""vLLM: the commands that start it, and the exports that it is known to serve correctly.

benchmarks/serving.py writes served.json. It holds, for each family and kind of export, the largest
difference in nats between vLLM and transformers, or why there is no such number. docs/export.md
shows it as a table. Imports no torch.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from finetune.config.multi_token import count_predicting_layers
from finetune.constants import CONFIG_FILE, HEADS, Names, find_positions
from finetune.files.json_files import read_json_object

SERVED_FILE = Path(__file__).with_name("served.json")
# Kind of export in served.json -> its name in tables.
KINDS = {
    "merged": "merged export",
    "adapter": "adapter",
    "experts": "adapter on experts",
    "head": "adapter on the output head",
    "added": "added tokens",
    "mtp": "multi-token prediction kept",
}
# The largest difference of a token's log-probability in fp32, in nats, that counts as equal.
CLOSE = 1e-4
CONTEXT = 4096  # positions of a server that is started here, unless the model has fewer
# The values that vLLM accepts as --max-lora-rank.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Keys of adapter_config.json with which vLLM does not load an adapter, unless UNSET_VALUES has the
# value.
UNSUPPORTED_KEYS = (
    "modules_to_save",
    "use_dora",
    "bias",
    "lora_bias",
    "oft_block_size",
    "fan_in_fan_out",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
UNSET_VALUES: tuple[Any, ...] = (None, False, [], "none")
# Values of init_lora_weights that leave the base as it is. vLLM refuses any other name.
SUPPORTED_STARTS = ("gaussian", "eva", "orthogonal")
# Key of adapter_config.json. With the value "vllm" modules have vLLM's names, and peft cannot open
# the adapter.
NAMES_KEY = "adapter_names"
# peft's names of the two parameters of a layer's experts. vLLM loads an adapter on both or neither.
EXPERT_PARAMETERS = {"gate_up_proj", "down_proj"}


@cache
def read_served() -> dict[str, Any]:
    """Reads served.json: {"vllm": version, "families": {model_type: {kind: result}}}.

    A result is the largest difference in nats, or a text: why there is no such number.
    """
    served: dict[str, Any] = json.loads(SERVED_FILE.read_text(encoding="utf-8"))
    return served


def was_served(model_type: str, kinds: Sequence[str]) -> bool:
    """Whether vLLM computed what transformers computes, measured for each of `kinds`.

    `kinds`: keys of `KINDS`.

    >>> was_served("llama", ["merged", "added"]), was_served("gpt2", ["merged"])
    (True, False)
    """
    results = read_served()["families"].get(model_type, {})
    return all(isinstance(results.get(kind), float) and results[kind] <= CLOSE for kind in kinds)


def list_kinds_of_model(config: Mapping[str, Any], has_added_tokens: bool) -> list[str]:
    """Lists the kinds of a Hugging Face folder with a model, by the content of its config.json.

    >>> list_kinds_of_model({"mtp_num_hidden_layers": 1}, False)
    ['merged', 'mtp']
    """
    kinds = ["merged"]
    if has_added_tokens:
        kinds.append("added")
    if count_predicting_layers(config):
        kinds.append("mtp")
    return kinds


def list_kinds_of_adapter(adapter: Mapping[str, Any]) -> list[str]:
    """Lists the kinds of a PEFT folder, by the content of its adapter_config.json.

    >>> list_kinds_of_adapter({"target_modules": [], "target_parameters": ["experts.down_proj"]})
    ['experts']
    """
    kinds = []
    if adapter.get("target_modules") or not list_expert_parameters(adapter):
        kinds.append("adapter")
    if list_expert_parameters(adapter):
        kinds.append("experts")
    # target_modules is a list of names or a regular expression: any word in it counts
    if HEADS.intersection(re.findall(r"\w+", str(adapter.get("target_modules")))):
        kinds.append("head")
    return kinds


def list_expert_parameters(adapter: Mapping[str, Any]) -> set[str]:
    """Lists the experts' parameters that an adapter adapts, by the last part of their names.

    They are the target_parameters of adapter_config.json that are not the weight of a layer.

    >>> list_expert_parameters(
    ...     {"target_parameters": ["mlp.experts.down_proj", "shared_experts.up_proj.weight"]}
    ... )
    {'down_proj'}
    """
    names = {name.rpartition(".")[2] for name in adapter.get("target_parameters") or ()}
    return names - {"weight"}


def why_not_loaded(adapter: Mapping[str, Any]) -> str | None:
    """Names what keeps vLLM from loading an adapter, by the content of its adapter_config.json.

    Returns None if vLLM loads it.

    >>> why_not_loaded({"r": 8, "use_dora": True}), why_not_loaded({"r": 8})
    ('use_dora', None)
    """
    for key in UNSUPPORTED_KEYS:
        if adapter.get(key) not in UNSET_VALUES:
            return key
    start = adapter.get("init_lora_weights", True)
    if isinstance(start, str) and start not in SUPPORTED_STARTS:
        return f"init_lora_weights: {start}"
    if _find_max_rank(adapter) is None:
        return f"a rank above {RANKS[-1]}"
    parameters = list_expert_parameters(adapter)
    if parameters and parameters != EXPERT_PARAMETERS:
        return f"{' and '.join(sorted(parameters))} of experts alone"
    return None


def _find_max_rank(adapter: Mapping[str, Any]) -> int | None:
    """Finds the smallest --max-lora-rank that suffices for an adapter; None if none does."""
    ranks = [adapter.get("r", 0), *(adapter.get("rank_pattern") or {}).values()]
    return next((max_rank for max_rank in RANKS if max_rank >= max(ranks)), None)


def rename_for_vllm(module: str, modules: Mapping[str, Names]) -> Names:
    """Returns vLLM's names for an adapted module: one, or one for each equal part of its outputs.

    Args:
        module: The module's name, with dots.
        modules: `Family.vllm_modules`.

    >>> rename_for_vllm("layers.0.mlp.up", {"up": ("a", "b"), "mlp": ("moe",)})
    ('layers.0.moe.a', 'layers.0.moe.b')
    """
    choices = [modules.get(part, (part,)) for part in module.split(".")]
    return tuple(".".join(parts) for parts in itertools.product(*choices))


def serve_model(folder: Path) -> list[str]:
    """Returns the command that serves a Hugging Face folder with a model."""
    return ["vllm", "serve", str(folder)]


def serve_adapter(folder: Path, base: str | None, adapter: Mapping[str, Any]) -> list[str] | None:
    """Returns the command that serves a PEFT folder on its base.

    Returns None if vLLM does not load the adapter, or if the base is not known.

    Args:
        folder: The PEFT folder. Its last part is the adapter's name on the server.
        base: A folder or a hub name; None: not known.
        adapter: The content of adapter_config.json.

    >>> " ".join(serve_adapter(Path("out/mine"), "base", {"r": 8}))
    'vllm serve base --enable-lora --max-lora-rank 8 --lora-modules mine=out/mine'
    """
    if base is None or why_not_loaded(adapter) is not None:
        return None
    max_rank = str(_find_max_rank(adapter))
    command = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", max_rank]
    if not list_expert_parameters(adapter):
        return [*command, "--lora-modules", f"{folder.name}={folder}"]
    # peft stacks the factors of all experts in one tensor. Without these options vLLM expects a
    # tensor for each expert, in most families.
    module = {"name": folder.name, "path": str(folder), "is_3d_lora_weight": True}
    return [*command, "--enable-mixed-moe-lora-format", "--lora-modules", json.dumps(module)]


def list_server_options(model_folder: Path, port: int) -> list[str]:
    """Lists options for `vllm serve`: the port, the model's dtype and CONTEXT positions.

    `model_folder`: the folder with the model's config.json. If there is no such folder here, vLLM
    chooses the dtype.
    """
    config = {}
    if model_folder.is_dir():
        config = read_json_object(model_folder / CONFIG_FILE)
    text_config = config.get("text_config") or config
    max_length = min(CONTEXT, find_positions(text_config) or CONTEXT)
    # with auto vLLM would serve float32 files in 16 bits
    dtype = str(config.get("dtype") or text_config.get("dtype") or "auto")
    return ["--port", str(port), "--max-model-len", str(max_length), "--dtype", dtype]
