"""vLLM: the commands that start it, and what it was seen to serve as transformers computes it.

Imports no torch.

served.json is written by benchmarks/serving.py: for each family and kind of export the largest
difference between the two in nats, or the cause why there is none. docs/export.md shows the same.
"""

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
KINDS = {
    "merged": "merged export",
    "adapter": "adapter",
    "experts": "adapter on experts",
    "head": "adapter on the output head",
    "added": "added tokens",
    "mtp": "multi-token prediction kept",
}
CLOSE = 1e-4  # nats, of one token in fp32
CONTEXT = 4096  # positions that a server is started with, where the model has as many
# What vLLM takes as --max-lora-rank.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Keys of an adapter that vLLM does not load, unless they hold one of these.
UNLOADED = (
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
ABSENT: tuple[Any, ...] = (None, False, [], "none")
# Values of init_lora_weights after which the base is what it was; vLLM refuses other names.
STARTS = ("gaussian", "eva", "orthogonal")
# Of adapter_config.json: "vllm" where modules have the names of vLLM, which peft does not open.
NAMES_KEY = "adapter_names"
# What peft calls the two parameters of a mixture's experts; vLLM loads both or neither.
EXPERT_PARAMETERS = {"gate_up_proj", "down_proj"}


@cache
def read_served() -> dict[str, Any]:
    """Returns served.json: "vllm", its version, and "families", by model_type and kind a difference
    or a cause.
    """
    served: dict[str, Any] = json.loads(SERVED_FILE.read_text(encoding="utf-8"))
    return served


def was_served(model_type: str, kinds: Sequence[str]) -> bool:
    """Whether vLLM was seen to compute what transformers does, for a family and each of `kinds`,
    keys of `KINDS`.

    >>> was_served("llama", ["merged", "added"]), was_served("gpt2", ["merged"])
    (True, False)
    """
    cells = read_served()["families"].get(model_type, {})
    return all(isinstance(cells.get(kind), float) and cells[kind] <= CLOSE for kind in kinds)


def list_kinds_of_model(config: Mapping[str, Any], has_added_tokens: bool) -> list[str]:
    """The kinds that a Hugging Face folder is of, by its config.json.

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
    """The kinds that a PEFT folder is of, by its adapter_config.json.

    >>> list_kinds_of_adapter({"target_modules": [], "target_parameters": ["experts.down_proj"]})
    ['experts']
    """
    kinds = []
    if adapter.get("target_modules") or not list_expert_parameters(adapter):
        kinds.append("adapter")
    if list_expert_parameters(adapter):
        kinds.append("experts")
    # names, or a pattern of them
    if HEADS.intersection(re.findall(r"\w+", str(adapter.get("target_modules")))):
        kinds.append("head")
    return kinds


def list_expert_parameters(adapter: Mapping[str, Any]) -> set[str]:
    """The names of the experts' parameters that an adapter is on; other target_parameters are
    weights of layers.

    >>> list_expert_parameters(
    ...     {"target_parameters": ["mlp.experts.down_proj", "shared_experts.up_proj.weight"]}
    ... )
    {'down_proj'}
    """
    names = {name.rpartition(".")[2] for name in adapter.get("target_parameters") or ()}
    return names - {"weight"}


def why_not_loaded(adapter: Mapping[str, Any]) -> str | None:
    """Says what keeps vLLM from loading an adapter, by its adapter_config.json; None where it
    does.

    >>> why_not_loaded({"r": 8, "use_dora": True}), why_not_loaded({"r": 8})
    ('use_dora', None)
    """
    for key in UNLOADED:
        if adapter.get(key) not in ABSENT:
            return key
    start = adapter.get("init_lora_weights", True)
    if isinstance(start, str) and start not in STARTS:
        return f"init_lora_weights: {start}"
    if _find_rank(adapter) is None:
        return f"a rank above {RANKS[-1]}"
    parameters = list_expert_parameters(adapter)
    if parameters and parameters != EXPERT_PARAMETERS:
        return f"{' and '.join(sorted(parameters))} of experts alone"
    return None


def _find_rank(adapter: Mapping[str, Any]) -> int | None:
    """The smallest rank that vLLM can be started with for an adapter; None where none is large
    enough.
    """
    ranks = [adapter.get("r", 0), *(adapter.get("rank_pattern") or {}).values()]
    return next((each for each in RANKS if each >= max(ranks)), None)


def rename_for_vllm(module: str, modules: Mapping[str, Names]) -> Names:
    """What vLLM calls an adapted module, or the equal parts of its outputs in their order.

    modules: `Family.vllm_modules`.

    >>> rename_for_vllm("layers.0.mlp.up", {"up": ("a", "b"), "mlp": ("moe",)})
    ('layers.0.moe.a', 'layers.0.moe.b')
    """
    names = [""]
    for part in module.split("."):
        renamed = modules.get(part, (part,))
        names = [f"{name}.{each}" for name in names for each in renamed]
    return tuple(name[1:] for name in names)


def serve_model(folder: Path) -> list[str]:
    """The command that serves a Hugging Face folder."""
    return ["vllm", "serve", str(folder)]


def serve_adapter(folder: Path, base: str | None, adapter: Mapping[str, Any]) -> list[str] | None:
    """The command that serves a PEFT folder on its base; None where vLLM loads no such adapter.

    Args:
        folder: Its name is the model's name for the server.
        base: A folder, or a name of the hub.
        adapter: The content of adapter_config.json.

    >>> " ".join(serve_adapter(Path("out/mine"), "base", {"r": 8}))
    'vllm serve base --enable-lora --max-lora-rank 8 --lora-modules mine=out/mine'
    """
    if base is None or why_not_loaded(adapter) is not None:
        return None
    rank = str(_find_rank(adapter))
    command = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", rank]
    if not list_expert_parameters(adapter):
        return [*command, "--lora-modules", f"{folder.name}={folder}"]
    # peft stacks the experts' factors. Without these vLLM expects the factors of each expert apart
    # in most families.
    module = {"name": folder.name, "path": str(folder), "is_3d_lora_weight": True}
    return [*command, "--enable-mixed-moe-lora-format", "--lora-modules", json.dumps(module)]


def list_server_options(described: Path, port: int) -> list[str]:
    """Options of `vllm serve`: the dtype of the files, and no more room than the model has
    positions.

    described: The folder with the model's config.json, where it is on this machine.
    """
    config = {}
    if described.is_dir():
        config = read_json_object(described / CONFIG_FILE)
    text = config.get("text_config") or config
    room = min(CONTEXT, find_positions(text) or CONTEXT)
    # by itself vLLM serves float32 in half of it
    dtype = str(config.get("dtype") or text.get("dtype") or "auto")
    return ["--port", str(port), "--max-model-len", str(room), "--dtype", dtype]
