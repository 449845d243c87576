"""Describes a model in llama.cpp's terms: its sizes as keys of the file, and its tensors with
llama.cpp's names and order of rows.
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

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # finds the number of an expert in a name
# Ends of names. llama.cpp computes routers in float32, and keeps them so, since they are small.
ROUTERS = (".ffn_gate_inp.weight",)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a GGUF file: the rows of `values` one after another, each block changed by
    `change`.
    """

    name: str  # llama.cpp's
    shape: Shape  # as torch has it; the file lists the sizes the other way round
    values: tuple[Value, ...]  # several for the experts of a layer
    # applied to blocks of rows in float32; a block holds whole groups of `group` rows
    change: Callable[[Tensor], Tensor] | None = None
    group: int = 1

    def blocks(self) -> Iterator[Tensor]:
        """Yields the changed rows in float32, in blocks of about BLOCK_BYTES."""
        for value in self.values:
            height = value.shape[0] if value.shape else 1
            row_bytes = max(1, 4 * math.prod(value.shape[1:]))
            fitting_rows = max(1, BLOCK_BYTES // row_bytes)
            step = max(self.group, fitting_rows // self.group * self.group)
            for start in range(0, height, step):
                block = value.rows(start, min(start + step, height)).float()
                yield self.change(block) if self.change is not None else block

    @property
    def stays_float32(self) -> bool:
        """Whether llama.cpp expects the tensor in float32, whatever the type of the file."""
        return (
            len(self.shape) <= 1
            or self.name.endswith(("_norm.weight", *ROUTERS))
            or "rope_f" in self.name
        )


def find_llama_cpp(model_type: str) -> LlamaCpp:
    """Returns how llama.cpp computes a family. Raises `UserError` if it is not exported as GGUF."""
    family = find_family(model_type).llama_cpp
    if family is None:
        known = ", ".join(name for name, each in FAMILIES.items() if each.llama_cpp is not None)
        raise UserError(
            f"--format gguf: {model_type}: not among the families that are exported as GGUF: "
            f"{known}"
        )
    return family


def check_config(config: Any, where: str) -> list[str]:
    """Checks that llama.cpp computes what `config` says.

    llama.cpp's code of a family fixes some settings, which config.json may set otherwise.

    Returns:
        Notes on what differs only for long texts; [] if nothing does.

    Raises:
        UserError: llama.cpp would compute a different model. The message begins with `where`.
    """
    family = find_llama_cpp(config.model_type)
    layers = config.num_hidden_layers
    # llama.cpp knows the one model that scales queries in another way by its number of layers.
    if layers == family.scales_like_27b:
        query_scalar = config.hidden_size // config.num_attention_heads
    else:
        query_scalar = head_size(config)
    # key -> (the config's value, llama.cpp's). None as the config's value: the key is not set, or
    # set to a value that changes nothing.
    settings: dict[str, tuple[Any, Any]] = {
        "hidden_act": (_get(config, "hidden_act", "hidden_activation"), family.activation),
        "query_pre_attn_scalar": (_get(config, "query_pre_attn_scalar"), query_scalar),
        "norm_topk_prob": (_get(config, "norm_topk_prob"), True),
        "mlp_only_layers": (_get(config, "mlp_only_layers") or None, None),
        "decoder_sparse_step": (_get(config, "decoder_sparse_step"), 1),
        "use_bidirectional_attention": (_get(config, "use_bidirectional_attention") or None, None),
    }
    if family.rope_skipped_every:
        has_rope = [int((layer + 1) % family.rope_skipped_every != 0) for layer in range(layers)]
        settings["no_rope_layers"] = (list(config.no_rope_layers), has_rope)
    if family.window_every:
        kinds = [
            "full_attention" if (layer + 1) % family.window_every == 0 else "sliding_attention"
            for layer in range(layers)
        ]
        settings["layer_types"] = (list(config.layer_types), kinds)
    for key, (value, fixed_value) in settings.items():
        if value is not None and value != fixed_value:
            difference = f"llama.cpp's {family.architecture} has {fixed_value!r:.60}"
            raise UserError(
                f"{where}: {key}: {value!r:.60}, where {difference}; export safetensors"
            )
    window = getattr(config, "sliding_window", None)
    if not window or window >= config.max_position_embeddings or family.window_every:
        return []
    # Without `layer_types` all layers have the window.
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        return []
    return [f"llama.cpp reads more than the last {window:,} tokens, where this model does not"]


def head_size(config: Any) -> int:
    """Returns the size of one attention head, from the config or from the hidden size."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _get(config: Any, *names: str) -> Any:
    """Returns the first of these attributes of `config` that is not None; None if there is none."""
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )


def write_sizes(writer: Any, config: Any) -> None:
    """Adds the sizes in `config` that llama.cpp reads to a `gguf.GGUFWriter`."""
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
    """Adds RoPE's keys to a `gguf.GGUFWriter`, and returns the tensors that some kinds need too.

    Raises `UserError` for a kind that llama.cpp's code of the family does not compute. The message
    begins with `where`.
    """
    family = find_llama_cpp(config.model_type)
    # Either RoPE's settings, or those of each type of layers.
    parameters: Mapping[str, Any] = config.rope_parameters
    rope = parameters.get("full_attention", parameters)
    windowed_rope = parameters.get("sliding_attention")
    rotated_size = int(head_size(config) * rope.get("partial_rotary_factor", 1.0))
    kind = rope.get("rope_type", "default")
    scales_windows = (
        windowed_rope is not None and windowed_rope.get("rope_type", "default") != "default"
    )
    if kind not in ("default", *family.stretches_rope) or scales_windows:
        known = ", ".join(family.stretches_rope)
        raise UserError(
            f"{where}: rope_type: {kind}: llama.cpp's {family.architecture} has {known}"
        )
    if rotated_size != head_size(config) and not family.rotates_parts:
        raise UserError(
            f"{where}: partial_rotary_factor: llama.cpp's {family.architecture} rotates whole heads"
        )
    writer.add_rope_dimension_count(rotated_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if windowed_rope is not None:
        writer.add_rope_freq_base_swa(windowed_rope["rope_theta"])
    # llama.cpp fixes these settings of YaRN.
    for key, fixed_value in (("beta_fast", 32), ("beta_slow", 1), ("truncate", True)):
        if kind == "yarn" and rope.get(key) not in (None, fixed_value):
            raise UserError(
                f"{where}: {key}: {rope[key]}: llama.cpp's {family.architecture} has {fixed_value}"
            )
    return SCALINGS[kind](writer, rope, config)


def _write_linear_scaling(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    """Adds the keys of RoPE whose positions are divided by a factor."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope["factor"])
    return []


def _write_yarn_scaling(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    """Adds the keys of YaRN."""
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(original)
    attention_factor = rope.get("attention_factor")
    if attention_factor is not None:
        # llama.cpp multiplies its default factor by the key.
        default_factor = 0.1 * math.log(rope["factor"]) + 1.0
        writer.add_rope_scaling_attn_factors(attention_factor / default_factor)
    return []


def _make_llama3_factors(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    """Makes the tensor by which llama.cpp divides the frequencies of plain RoPE; adds no key."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    exponents = torch.arange(0, head_size(config), 2).float() / head_size(config)
    plain_frequencies = 1.0 / rope["rope_theta"] ** exponents
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return [_make_tensor("rope_freqs.weight", plain_frequencies / frequencies)]


def _write_longrope_scaling(writer: Any, rope: Mapping[str, Any], config: Any) -> list[FileTensor]:
    """Adds the keys of LongRoPE, and returns its factors for long and for short texts."""
    original = (
        rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    )
    factor = rope.get("factor") or config.max_position_embeddings / original
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        # transformers' default
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(attention_factor)
    return [
        _make_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]))
        for length in ("long", "short")
    ]


# rope_type -> function of (writer, RoPE's settings, config), which adds the keys of this kind of
# RoPE, and returns the tensors that the file needs for it
SCALINGS: Mapping[str, Callable[[Any, Mapping[str, Any], Any], list[FileTensor]]] = {
    "default": lambda writer, rope, config: [],
    "linear": _write_linear_scaling,
    "yarn": _write_yarn_scaling,
    "llama3": _make_llama3_factors,
    "longrope": _write_longrope_scaling,
}


def _make_tensor(name: str, values: Tensor) -> FileTensor:
    """Makes a tensor of the file from `values` in memory."""
    value = Value(
        name, tuple(values.shape), torch.float32, lambda start, stop: values[start:stop].float()
    )
    return FileTensor(name, value.shape, (value,))


def plan_tensors(values: Sequence[Value], config: Any, where: str) -> list[FileTensor]:
    """Plans the file's tensors from those of a Hugging Face folder, using each of them once.

    The experts of a layer are a tensor each in the folder, and one tensor in the file.

    Raises `UserError`, with a message that begins with `where`, for a tensor that llama.cpp's code
    of the family has no place for.
    """
    family = find_llama_cpp(config.model_type)
    architecture = next(
        number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture
    )
    llama_names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    grouped: dict[str, list[Value]] = {}  # by names without the numbers of experts
    for value in values:
        name = EXPERT.sub(".experts.", value.name)
        if ".experts.w" in name:  # Mixtral; the package knows its experts by other names
            name = name.replace("model.", "", 1).replace("block_sparse_moe", "feed_forward")
        grouped.setdefault(name, []).append(value)
    planned = []
    for name, group in grouped.items():
        llama_name = llama_names.get_name(name, try_suffixes=(".weight", ".bias"))
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
        in_order = sorted(group, key=_find_expert_number)
        planned.append(_plan_tensor(llama_name, name, in_order, config, family))
    return planned


def _find_expert_number(value: Value) -> int:
    """Returns the number of the expert that a tensor belongs to; 0 if it belongs to none."""
    match = EXPERT.search(value.name)
    return int(match[1]) if match else 0


def _plan_tensor(
    name: str, folder_name: str, values: list[Value], config: Any, family: LlamaCpp
) -> FileTensor:
    """Plans one tensor of the file, with the change that llama.cpp's code of the family expects.

    Args:
        name: llama.cpp's name.
        folder_name: The name in the Hugging Face folder, without the number of an expert.
        values: One tensor, or those of all experts in order.
        config: The model's config.
        family: How llama.cpp computes the family.
    """
    first = values[0]
    if EXPERT.search(first.name) is None:
        shape = first.shape
    else:
        shape = (len(values), *first.shape)
    size = head_size(config)
    if family.rotates_neighbors and folder_name.split(".")[-2] in ("q_proj", "k_proj"):
        interleave = partial(interleave_rows, size=size)
        return FileTensor(name, shape, tuple(values), interleave, group=size)
    if family.adds_one_to_norms and folder_name.endswith("norm.weight"):
        return FileTensor(name, shape, tuple(values), lambda weight: weight + 1)
    return FileTensor(name, shape, tuple(values))


def interleave_rows(rows: Tensor, size: int) -> Tensor:
    """Reorders the rows of whole heads, so that rows which RoPE rotates together are neighbors.

    In transformers the second row of each pair is half a head after the first.

    size: The rows of a head.

    >>> interleave_rows(torch.arange(8), 4).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return rows.reshape(-1, 2, size // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
