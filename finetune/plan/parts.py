"""Parts of a decoder layer that are not Llama's: a mixture of experts, and multi-head latent attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from finetune.plan.family_facts import Family, MixtureKeys


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One parameter: transformers' name and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The sizes of a layer's routed experts."""

    experts: int
    chosen: int  # of a token
    intermediate: int  # of one expert
    shared: int  # of the expert that every token passes; 0: none
    layers: frozenset[int]  # the decoder layers that have them; the others are dense
    keys: MixtureKeys

    def expert_weights(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """The weights of all routed experts of the layer whose MLP is named `mlp`."""
        shapes = {"gate_up_proj": (2 * self.intermediate, hidden), "down_proj": (hidden, self.intermediate)}
        return tuple(
            TensorShape(f"{mlp}.experts.{name}", (self.experts, *(shape[::-1] if self.keys.has_biases else shape)))
            for name, shape in shapes.items()
        )

    def expert_biases(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """The biases of all routed experts."""
        if not self.keys.has_biases:
            return ()
        widths = {"gate_up_proj_bias": 2 * self.intermediate, "down_proj_bias": hidden}
        return tuple(TensorShape(f"{mlp}.experts.{name}", (self.experts, width)) for name, width in widths.items())

    def router(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """What chooses the experts of a token."""
        weight = TensorShape(f"{mlp}.{self.keys.router}.weight", (self.experts, hidden))
        bias = TensorShape(f"{mlp}.{self.keys.router}.bias", (self.experts,))
        return (weight, bias) if self.keys.has_biases else (weight,)

    def shared_linears(self, mlp: str, hidden: int) -> dict[str, tuple[int, int]]:
        """The linear layers of the expert that every token passes."""
        if not self.shared:
            return {}
        into, out = (self.shared, hidden), (hidden, self.shared)
        if self.keys.shared is None:
            expert = f"{mlp}.shared_experts"
            return {f"{expert}.gate_proj": into, f"{expert}.up_proj": into, f"{expert}.down_proj": out}
        expert = f"{mlp}.shared_expert"
        shapes = {f"{expert}.gate_proj": into, f"{expert}.up_proj": into, f"{expert}.down_proj": out}
        return shapes | {f"{expert}_gate": (1, hidden)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The sizes of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): queries, keys and values
    come out of narrow latents; a part of each query and key is rotated, the other is not."""

    query_rank: int | None  # None: queries come from the hidden state
    key_value_rank: int
    rotated: int  # of a head's query and key; all heads share that of the key
    plain: int  # the rest of a head's query and key
    value: int  # of a head

    @property
    def query_key_size(self) -> int:
        """Of a head's query, and of its key."""
        return self.plain + self.rotated

    def linears(self, attention: str, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """The linear layers [out, in] of the attention named `attention`."""
        queries = heads * self.query_key_size
        query = (
            {f"{attention}.q_proj": (queries, hidden)}
            if self.query_rank is None
            else {
                f"{attention}.q_a_proj": (self.query_rank, hidden),
                f"{attention}.q_b_proj": (queries, self.query_rank),
            }
        )
        return query | {
            f"{attention}.kv_a_proj_with_mqa": (self.key_value_rank + self.rotated, hidden),
            f"{attention}.kv_b_proj": (heads * (self.plain + self.value), self.key_value_rank),
            f"{attention}.o_proj": (hidden, heads * self.value),
        }

    def norms(self, attention: str) -> tuple[TensorShape, ...]:
        """The norms of the latents."""
        ranks = {"q_a_layernorm": self.query_rank, "kv_a_layernorm": self.key_value_rank}
        return tuple(TensorShape(f"{attention}.{name}.weight", (rank,)) for name, rank in ranks.items() if rank)


def read_mixture(family: Family, sizes: Mapping[str, Any]) -> Mixture | None:
    """The routed experts of a config with these `sizes`; None where the family is dense, or no layer has any."""
    if family.mixture is None:
        return None
    keys, layers = family.mixture, frozenset(range(sizes["num_hidden_layers"]))
    if keys.some_are_dense:
        dense, every = sizes.get("mlp_only_layers") or (), sizes.get("decoder_sparse_step") or 1
        layers = frozenset(index for index in layers if index not in dense and (index + 1) % every == 0)
    if keys.first_are_dense:
        layers = frozenset(index for index in layers if index >= sizes["first_k_dense_replace"])
    if not layers or not sizes[keys.experts]:
        return None
    shared = sizes[keys.shared] if keys.shared else 0
    if keys.shared_count:
        shared = sizes[keys.intermediate] * sizes[keys.shared_count]
    return Mixture(
        experts=sizes[keys.experts],
        chosen=sizes["num_experts_per_tok"],
        intermediate=sizes[keys.intermediate],
        shared=shared,
        layers=layers,
        keys=keys,
    )


def read_latent_attention(
    family: Family, config: Mapping[str, Any], sizes: Mapping[str, Any]
) -> LatentAttention | None:
    """The latent attention of a `config` with these `sizes`, defaults included; None where the family's is not."""
    if not family.latent_attention:
        return None
    return LatentAttention(
        query_rank=config.get("q_lora_rank", sizes["q_lora_rank"]),  # null: no latent
        key_value_rank=sizes["kv_lora_rank"],
        rotated=sizes["qk_rope_head_dim"],
        plain=sizes["qk_nope_head_dim"],
        value=sizes["v_head_dim"],
    )
