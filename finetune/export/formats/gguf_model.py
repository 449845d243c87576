"""A model as llama.cpp reads it: sizes as keys, and tensors under llama.cpp's names and in its
order of rows.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import torch
from torch import Tensor

from finetune.config.families import FAMILIES, LlamaCpp, find_family
from finetune.constants import Shape
from finetune.errors import UserError
from finetune.export.target import BLOCK_BYTES, Value

EXPERT = re.compile(r"\.experts\.(\d+)\.")
# computed in float32, and so small that llama.cpp keeps them so
ROUTERS = (".ffn_gate_inp.weight",)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a GGUF file: the rows of `values`, one after the other, in float32."""

    name: str
    shape: Shape  # as torch has it; the file lists it the other way round
    values: tuple[Value, ...]
    change: Callable[[Tensor], Tensor] | None = None  # of whole groups of `group` rows
    group: int = 1

    def blocks(self) -> Iterator[Tensor]:
        """The rows in float32, a few at a time."""
        for value in self.values:
            height = value.shape[0] if value.shape else 1
            rows = max(1, BLOCK_BYTES // max(1, 4 * math.prod(value.shape[1:])))
            step = max(self.group, rows // self.group * self.group)
            for start in range(0, height, step):
                block = value.rows(start, min(start + step, height)).float()
                yield self.change(block) if self.change is not None else block

    @property
    def stays_float32(self) -> bool:
        """Whether llama.cpp wants it in float32 in a file of any type."""
        return (
            len(self.shape) <= 1
            or self.name.endswith(("_norm.weight", *ROUTERS))
            or "rope_f" in self.name
        )


def find_llama_cpp(model_type: str) -> LlamaCpp:
    """How llama.cpp computes a family. Raises `UserError` where it is not exported as GGUF."""
    family = find_family(model_type).llama_cpp
    if family is None:
        known = ", ".join(name for name, each in FAMILIES.items() if each.llama_cpp is not None)
        raise UserError(
            f"--format gguf: {model_type}: not among the families that are exported as GGUF: "
            f"{known}"
        )
    return family


def check_config(config: Any, where: str) -> list[str]:
    """Names what llama.cpp computes otherwise than `config` says, beyond some number of tokens.

    Raises `UserError` where it would compute another model.
    """
    family = find_llama_cpp(config.model_type)
    layers = config.num_hidden_layers
    if layers == family.scales_like_27b:
        scaled_by = config.hidden_size // config.num_attention_heads
    else:
        scaled_by = head_size(config)
    both_ways = getattr(config, "use_bidirectional_attention", None)
    differing: dict[str, tuple[Any, Any]] = {
        "hidden_act": (_get(config, "hidden_act", "hidden_activation"), family.activation),
        "query_pre_attn_scalar": (getattr(config, "query_pre_attn_scalar", None), scaled_by),
        "norm_topk_prob": (getattr(config, "norm_topk_prob", None), True),
        "mlp_only_layers": (getattr(config, "mlp_only_layers", None) or None, None),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", None), 1),
        "use_bidirectional_attention": (both_ways or None, None),
    }
    if family.rope_skipped_every:
        expected = [int((layer + 1) % family.rope_skipped_every != 0) for layer in range(layers)]
        differing["no_rope_layers"] = (list(config.no_rope_layers), expected)
    if family.window_every:
        kinds = [
            "full_attention" if (n + 1) % family.window_every == 0 else "sliding_attention"
            for n in range(layers)
        ]
        differing["layer_types"] = (list(config.layer_types), kinds)
    for key, (value, expected) in differing.items():
        if value is not None and value != expected:
            has = f"llama.cpp's {family.architecture} has {expected!r:.60}"
            raise UserError(f"{where}: {key}: {value!r:.60}, where {has}; export safetensors")
    window = getattr(config, "sliding_window", None)
    if not window or window >= config.max_position_embeddings or family.window_every:
        return []
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        return []
    return [f"llama.cpp reads more than the last {window:,} tokens, where this model does not"]


def head_size(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _get(config: Any, *names: str) -> Any:
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )


def write_sizes(writer: Any, config: Any) -> None:
    """Adds what llama.cpp must know of `config` to a `gguf.GGUFWriter`."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(_get(config, "num_key_value_heads", "num_attention_heads"))
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (mixture := find_family(config.model_type).mixture) is not None:
        writer.add_expert_count(getattr(config, mixture.experts))
        writer.add_expert_used_count(config.num_experts_per_tok)
        if mixture.intermediate != "intermediate_size":
            writer.add_expert_feed_forward_length(getattr(config, mixture.intermediate))
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        writer.add_attn_logit_softcapping(cap)
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        writer.add_final_logit_softcapping(cap)
    if find_llama_cpp(config.model_type).window_every:
        writer.add_sliding_window(config.sliding_window)


def write_rope(writer: Any, config: Any, where: str) -> list[FileTensor]:
    """Adds RoPE's keys to a `gguf.GGUFWriter`, and returns the tensors that go with them.

    Raises `UserError` for a kind that llama.cpp's code of the family does not compute.
    """
    family = find_llama_cpp(config.model_type)
    every: Mapping[str, Any] = config.rope_parameters
    rope = every.get("full_attention", every)
    rotated = int(head_size(config) * rope.get("partial_rotary_factor", 1.0))
    kind = rope.get("rope_type", "default")
    windowed = every.get("sliding_attention")
    scaled_windows = windowed is not None and windowed.get("rope_type", "default") != "default"
    if kind not in ("default", *family.stretches_rope) or scaled_windows:
        known = ", ".join(family.stretches_rope)
        raise UserError(
            f"{where}: rope_type: {kind}: llama.cpp's {family.architecture} has {known}"
        )
    if rotated != head_size(config) and not family.rotates_parts:
        raise UserError(
            f"{where}: partial_rotary_factor: llama.cpp's {family.architecture} rotates whole heads"
        )
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    if windowed is not None:
        writer.add_rope_freq_base_swa(windowed["rope_theta"])
    for key, fixed in (("beta_fast", 32), ("beta_slow", 1), ("truncate", True)):
        if kind == "yarn" and rope.get(key) not in (None, fixed):
            raise UserError(
                f"{where}: {key}: {rope[key]}: llama.cpp's {family.architecture} has {fixed}"
            )
    return SCALINGS[kind](writer, rope, config)


def _no_scaling(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    return []


def _linear(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope["factor"])
    return []


def _yarn(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(original)
    # llama.cpp multiplies its own default by the key
    if (attention := rope.get("attention_factor")) is not None:
        writer.add_rope_scaling_attn_factors(attention / (0.1 * math.log(rope["factor"]) + 1.0))
    return []


def _llama3(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    """Frequencies are divided by a tensor of the file."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = 1.0 / rope["rope_theta"] ** (
        torch.arange(0, head_size(config), 2).float() / head_size(config)
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return [_generated("rope_freqs.weight", plain / scaled)]


def _longrope(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    original = (
        rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    )
    stretched = rope.get("factor") or config.max_position_embeddings / original
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0
        if stretched > 1:
            attention = math.sqrt(1 + math.log(stretched) / math.log(original))
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(attention)
    factors = {which: torch.tensor(rope[f"{which}_factor"]) for which in ("long", "short")}
    return [_generated(f"rope_factors_{which}.weight", values) for which, values in factors.items()]


SCALINGS: Mapping[str, Callable[[Any, Mapping[str, Any], Any], list[FileTensor]]] = {
    "default": _no_scaling,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _generated(name: str, values: Tensor) -> FileTensor:
    value = Value(
        name, tuple(values.shape), torch.float32, lambda start, stop: values[start:stop].float()
    )
    return FileTensor(name, value.shape, (value,))


def plan_tensors(values: Sequence[Value], config: Any, where: str) -> list[FileTensor]:
    """The tensors of a Hugging Face folder under llama.cpp's names. Each of them is used once.

    Raises `UserError` for one that llama.cpp's code of the family has no place for.
    """
    family = find_llama_cpp(config.model_type)
    names = {
        number: name
        for number, name in gguf.MODEL_ARCH_NAMES.items()
        if name == family.architecture
    }
    mapped = gguf.get_tensor_name_map(next(iter(names)), config.num_hidden_layers)
    grouped: dict[str, list[Value]] = {}
    for value in values:  # the experts of a layer follow each other, by number
        name = EXPERT.sub(".experts.", value.name)
        if ".experts.w" in name:  # Mixtral's names
            name = name.replace("model.", "", 1).replace("block_sparse_moe", "feed_forward")
        grouped.setdefault(name, []).append(value)
    planned = []
    for name, each in grouped.items():
        llama_name = mapped.get_name(name, try_suffixes=(".weight", ".bias"))
        module = name.split(".")[-2] if "." in name else name
        has_no_place = name.endswith(".bias") and module not in family.biases
        if (
            llama_name is None
            or has_no_place
            or (llama_name == "output.weight" and not family.has_own_head)
        ):
            raise UserError(
                f"{where}: {name}: llama.cpp's {family.architecture} has no such tensor; export "
                "safetensors"
            )
        planned.append(
            _plan_tensor(llama_name, name, sorted(each, key=_expert_number), config, family)
        )
    return planned


def _expert_number(value: Value) -> int:
    match = EXPERT.search(value.name)
    return int(match[1]) if match else 0


def _plan_tensor(
    name: str, of_folder: str, values: list[Value], config: Any, family: LlamaCpp
) -> FileTensor:
    if EXPERT.search(values[0].name) is None:
        shape = values[0].shape
    else:
        shape = (len(values), *values[0].shape)
    size = head_size(config)
    if family.rotates_neighbors and of_folder.split(".")[-2] in ("q_proj", "k_proj"):
        return FileTensor(
            name, shape, tuple(values), partial(interleave_rows, size=size), group=size
        )
    if family.adds_one_to_norms and of_folder.endswith("norm.weight"):
        return FileTensor(name, shape, tuple(values), lambda weight: weight + 1)
    return FileTensor(name, shape, tuple(values))


def interleave_rows(rows: Tensor, size: int) -> Tensor:
    """Rows of whole heads of `size`, so that those which RoPE turns together are neighbors.

    >>> interleave_rows(torch.arange(8), 4).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return rows.reshape(-1, 2, size // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
