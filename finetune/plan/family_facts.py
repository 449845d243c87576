"""What the plan must know of a model family beyond its config.json: the form in which `families.py` states it."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureKeys:
    """Which keys of config.json give the sizes of a family's routed experts."""

    experts: str = "num_experts"
    intermediate: str = "moe_intermediate_size"
    shared: str | None = None  # intermediate size of the expert that every token passes
    shared_count: str | None = None  # the same in intermediate sizes of routed experts, without a gate of its own
    some_are_dense: bool = False  # whether mlp_only_layers and decoder_sparse_step make some layers dense
    first_are_dense: bool = False  # whether first_k_dense_replace makes the first layers dense
    router: str = "gate"  # its name in the MLP
    routes_in_fp32: bool = False  # whether the router multiplies in fp32
    has_biases: bool = False  # of router and experts, whose weights are [experts, in, out] then
    gate_tensors: int = 3  # that an expert's gating saves, of its intermediate size, beside the product


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The facts of one `model_type` that are not in its config.json."""

    decoder_layer: str  # the class that FSDP wraps
    defaults: dict[str, int] = field(default_factory=dict)  # sizes that a config.json may omit
    tied: bool = False  # tie_word_embeddings where the config does not say
    query_key_value_bias: bool | Literal["attention_bias"] = False
    output_bias: bool | Literal["attention_bias"] = False
    attention_bias: bool = False  # where the config does not say
    mlp_bias: bool | Literal["mlp_bias"] = False
    query_key_norm: Literal["head", "all"] | None = None  # over each head, or over all heads together
    query_key_norm_key: str | None = None  # of config.json, which says whether there are such norms
    latent_attention: bool = False  # queries, keys and values come out of latents (DeepSeek's MLA)
    # What flash attention does not compute: see attention_memory.py.
    sinks: bool = False  # a score of each head that gives no value
    caps_scores: bool = False  # attn_logit_softcapping
    fused: bool = False  # one qkv_proj and one gate_up_proj
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_after: bool = False  # norms stand after attention and MLP only, so these read the residual stream itself
    mixture: MixtureKeys | None = None  # None: dense
    norm_keeps_fp32: bool = False  # the weight is multiplied in fp32, so that the normalized input is kept in fp32
