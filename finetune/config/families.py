"""Families of models: what the package knows about each, by model_type.

The facts are from the model and configuration classes of transformers 5. tests/plan builds every
planned family on the meta device and compares names and shapes, so it fails when a release changes
one. A family without a row trains too, as long as no check of a run finds a fault. Imports no
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from finetune.constants import Names


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureKeys:
    """The keys of config.json for the sizes of a family's experts, and how its layers use them."""

    experts: str = "num_experts"  # key: routed experts of a layer
    intermediate: str = "moe_intermediate_size"  # key: intermediate size of a routed expert
    # key: intermediate size of the shared expert, which every token passes through; None: no key
    shared: str | None = None
    # key: the same size as a multiple of a routed expert's; such a shared expert has no gate
    shared_count: str | None = None
    # whether mlp_only_layers and decoder_sparse_step make some layers dense
    some_are_dense: bool = False
    first_are_dense: bool = False  # whether first_k_dense_replace makes the first layers dense
    router: str = "gate"  # the router's name in the MLP
    routes_in_fp32: bool = False  # whether the router multiplies in fp32
    # whether router and experts have biases; the experts' weights are then [experts, in, out]
    has_biases: bool = False
    # tensors of an expert's intermediate size that its gating saves for the backward, besides the
    # product
    gate_tensors: int = 3
    gates_itself: bool = False  # whether the family gates by a formula of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCpp:
    """How llama.cpp's code computes a family.

    A model whose config.json says something else cannot be exported as GGUF.
    """

    architecture: str  # llama.cpp's name of the family
    # whether RoPE rotates pairs of neighboring rows of a head; transformers pairs rows that are
    # half a head apart
    rotates_neighbors: bool = False
    # whether transformers multiplies by 1 + weight, and llama.cpp by the weight in the file
    adds_one_to_norms: bool = False
    activation: str = "silu"
    biases: Names = ()  # the linear layers whose biases it adds
    # 6: every 6th layer has full attention, and the others have a window; None: all layers have
    # full attention
    window_every: int | None = None
    # 4: every 4th layer has no RoPE; None: all layers have it
    rope_skipped_every: int | None = None
    has_own_head: bool = True  # False: the embedding is the head
    # the number of layers of the model whose queries it scales by hidden_size / heads; it scales
    # those of other models by head_dim
    scales_like_27b: int | None = None
    stretches_rope: Names = ("linear", "yarn")  # the rope types that it computes besides default
    rotates_parts: bool = False  # whether it reads partial_rotary_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The modules of a family that carry a state from token to token.

    Packed documents are kept apart in them by `arguments`, if all `packages` are installed.
    Otherwise, or if there are no `arguments`, the modules would ignore the boundaries, so they are
    run on one document after the other.
    """

    modules: Names  # suffixes of the names of the modules' classes
    arguments: Names = ()  # arguments of a module for the boundaries of packed documents
    packages: Names = ()  # import names of the packages with kernels that read `arguments`
    # whether transformers' own code, without kernels, loops over the tokens
    steps_through_tokens: bool = False
    # whether a forward of padded prompts computes the same with transformers' cache as without it
    can_be_sampled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The facts about one `model_type` that are not in config.json.

    `Family()`, with the defaults, stands for a family without a row.
    """

    # What it can do here.
    # what tensor parallelism shards in attention: its heads, or only its matrix products, after
    # which every rank attends with all heads; None: not supported
    tensor_parallel: Literal["heads", "products"] | None = None
    # linear layers that cannot have an adapter: they return more than their product, are read
    # without being called, or belong to several decoder layers
    unadaptable: Names = ()
    # who makes the attention mask, for a family that knows packed documents only by a mask:
    # transformers, from position ids, or models/documents.py
    document_mask: Literal["transformers", "here"] | None = None
    # whether its layers do not pass the arguments of the model's forward on to attention
    drops_arguments: bool = False
    # whether its embedding of positions counts the tokens of a row, padding included
    counts_positions: bool = False
    # whether positions are embedded by a table of limited length
    has_position_table: bool = False
    # whether it trains only on rows of one length, which its positions fill
    has_axial_positions: bool = False
    # whether a packed row may have no more than max_position_embeddings tokens, however short its
    # documents are
    bounds_rows: bool = False
    # None: no layer is known that carries a state from token to token
    recurrence: Recurrence | None = None
    # whether it is the language model of a vision-language model, without a class of its own
    is_of_vision: bool = False
    # The next four are facts about the model_type of a whole vision-language model.
    # whether it trains on images; tests/training/test_images.py compares each with transformers
    takes_images: bool = False
    # whether the tokens of an image attend to each other in both directions, in every layer
    images_see_themselves: bool = False
    # whether layers of cross attention read the images, and one token stands for each image
    images_are_read_across: bool = False
    # whether the embedders of images and of audio read every token, before the language model
    embedders_read_all_tokens: bool = False
    # rows that the embedding has more than the head: the ids of images
    rows_beyond_head: int = 0
    # Its sizes and layers.
    # key of config.json -> the size if the key is omitted; empty: the plan does not know the layers
    defaults: dict[str, int] = field(default_factory=dict)
    tied: bool = False  # tie_word_embeddings if the config does not say
    # whether published files without tie_word_embeddings hold a head, although the class ties it
    untied_in_files: bool = False
    # whether there are biases; a name is the key of config.json that decides
    query_key_value_bias: bool | Literal["attention_bias"] = False
    output_bias: bool | Literal["attention_bias"] | None = None  # None: as query_key_value_bias
    attention_bias: bool = False  # the key attention_bias if the config does not say
    mlp_bias: bool | Literal["mlp_bias"] = False
    # norms of queries and keys: over each head, or over all heads together; None: none
    query_key_norm: Literal["head", "all"] | None = None
    query_key_norm_key: str | None = None  # key of config.json that turns them on; None: always on
    # whether queries, keys and values are computed from latents (DeepSeek's MLA)
    latent_attention: bool = False
    # The next two are what flash attention does not compute: see plan/activations.py.
    sinks: bool = False  # whether each head has a score that takes weight and gives no value
    caps_scores: bool = False  # whether scores are capped (attn_logit_softcapping)
    caps_logits: bool = False  # whether logits are, if final_logit_softcapping is omitted
    fused: bool = False  # whether it has one qkv_proj and one gate_up_proj
    norms: Names = ("input_layernorm", "post_attention_layernorm")
    # whether norms stand only after attention and MLP, which then read the residual stream itself
    norm_after: bool = False
    mixture: MixtureKeys | None = None  # None: dense
    # whether a norm multiplies by its weight in fp32, and so saves its normalized input in fp32
    norm_keeps_fp32: bool = False
    llama_cpp: LlamaCpp | None = None  # None: not exported as GGUF
    # part of a module's name -> vLLM's name for it in an adapter, if that differs; under several
    # names vLLM adapts equal parts of the layer's outputs separately
    vllm_modules: Mapping[str, Names] = field(default_factory=dict)

    @property
    def opens_in_mlx(self) -> bool:
        """Whether mlx-lm is known to compute what transformers does (tests/export/test_mlx.py).

        It does for the families that are exported as GGUF, except Gemma 2, whose logits differ by
        0.4%, and Qwen3 MoE, which does not open.
        """
        return self.llama_cpp is not None and self.llama_cpp.architecture not in (
            "gemma2",
            "qwen3moe",
        )

    @property
    def is_planned(self) -> bool:
        """Whether the plan knows the family's layers, and transformers has a class for it."""
        return bool(self.defaults) and not self.is_of_vision

    @property
    def has_pipeline(self) -> bool:
        """Whether it trains in a pipeline.

        tests/training/test_pipeline.py compares such a family's losses with those of one process.
        """
        return self.is_planned

    @property
    def has_expert_parallelism(self) -> bool:
        """Whether its experts can be sharded over ranks.

        tests/training/test_expert_parallel.py compares such a family's losses with those of one
        process.
        """
        return self.is_planned and self.mixture is not None


def _sizes(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    key_value_heads: int | None,
    vocabulary: int,
    **others: int,
) -> dict[str, int]:
    """Returns a family's default sizes, by the keys of config.json.

    `others` are sizes that not every family has, under their keys. `key_value_heads`: None: as many
    as heads.
    """
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    if key_value_heads is not None:
        sizes["num_key_value_heads"] = key_value_heads
    return sizes | {"vocab_size": vocabulary, **others}


SIZES_7B = _sizes(4096, 11008, 32, 32, None, 32000)
QWEN_SIZES = _sizes(4096, 22016, 32, 32, 32, 151936)
SHARED_EXPERTS = MixtureKeys(
    experts="n_routed_experts",
    shared_count="n_shared_experts",
    first_are_dense=True,
    routes_in_fp32=True,
)
# Rows that several families share.
LLAMA = Family(
    tensor_parallel="heads",
    defaults=SIZES_7B,
    query_key_value_bias="attention_bias",
    mlp_bias="mlp_bias",
)
GEMMA_2 = Family(
    tensor_parallel="heads",
    defaults=_sizes(2304, 9216, 26, 8, 4, 256000, head_dim=256),
    tied=True,
    query_key_value_bias="attention_bias",
    caps_scores=True,
    caps_logits=True,
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    norm_keeps_fp32=True,
)
OLMO_2 = Family(
    defaults=SIZES_7B | {"vocab_size": 50304},
    query_key_value_bias="attention_bias",
    query_key_norm="all",
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norm_after=True,
    norm_keeps_fp32=True,
)
QWEN_2 = Family(defaults=QWEN_SIZES, query_key_value_bias=True, output_bias=False)
QWEN_3 = Family(
    defaults=QWEN_SIZES | {"head_dim": 128},
    query_key_value_bias="attention_bias",
    query_key_norm="head",
)
WITH_IMAGES = Family(takes_images=True)
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GGUF_LLAMA = LlamaCpp(
    architecture="llama",
    rotates_neighbors=True,
    biases=(*QUERY_KEY_VALUE, "o_proj", "gate_proj", "up_proj", "down_proj"),
    stretches_rope=("linear", "yarn", "llama3"),
)
GGUF_GEMMA = LlamaCpp(
    architecture="gemma",
    adds_one_to_norms=True,
    activation="gelu_pytorch_tanh",
    has_own_head=False,
    stretches_rope=("linear",),
)
BY_MASK = Family(document_mask="transformers")
BY_OUR_MASK = Family(document_mask="here")
BY_TABLE = Family(has_position_table=True)
DELTA_NET = Family(
    recurrence=Recurrence(
        modules=("GatedDeltaNet",),
        arguments=("cu_seq_lens_q", "seq_idx"),
        packages=("fla", "causal_conv1d"),
    )
)
# The kernels of Mamba layers read these weights without calling the linear layers, so an adapter of
# them would be ignored.
MAMBA = Family(
    recurrence=Recurrence(modules=("MambaMixer",), steps_through_tokens=True),
    unadaptable=("conv1d", "dt_proj", "out_proj", "x_proj"),
)
MAMBA_2 = Family(
    recurrence=Recurrence(
        modules=("Mixer", "MambaLayer"),
        arguments=("seq_idx",),
        packages=("mamba_ssm", "causal_conv1d"),
    ),
    unadaptable=("conv1d", "out_proj"),
)


# The linear layers of the blocks that Zamba's decoder layers share. Each decoder layer would have
# its own adapter on the same weights, and such adapters could not be merged.
OF_SHARED_BLOCKS = (
    *("0", "1", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)


def _forbid_sampling(family: Family) -> Family:
    """Returns a family with recurrence as one that cannot be sampled."""
    assert family.recurrence is not None
    return replace(family, recurrence=replace(family.recurrence, can_be_sampled=False))


CONVOLUTION = Family(
    recurrence=Recurrence(
        modules=("ShortConv",), arguments=("seq_idx",), packages=("causal_conv1d",)
    )
)
DELTA_ATTENTION = Family(recurrence=Recurrence(modules=("DeltaAttention",)))

FAMILIES: Mapping[str, Family] = {
    "llama": replace(LLAMA, llama_cpp=GGUF_LLAMA),
    "mistral": Family(
        tensor_parallel="heads",
        defaults=_sizes(4096, 14336, 32, 32, 8, 32000),
        llama_cpp=replace(GGUF_LLAMA, biases=()),
    ),
    "qwen2": replace(
        QWEN_2,
        tensor_parallel="heads",
        llama_cpp=LlamaCpp(architecture="qwen2", biases=QUERY_KEY_VALUE),
    ),
    "qwen3": replace(QWEN_3, tensor_parallel="heads", llama_cpp=LlamaCpp(architecture="qwen3")),
    "gemma": Family(
        tensor_parallel="heads",
        defaults=_sizes(3072, 24576, 28, 16, 16, 256000, head_dim=256),
        tied=True,
        query_key_value_bias="attention_bias",
        norm_keeps_fp32=True,
        llama_cpp=GGUF_GEMMA,
    ),
    "gemma2": replace(
        GEMMA_2,
        llama_cpp=replace(GGUF_GEMMA, architecture="gemma2", window_every=2, scales_like_27b=46),
    ),
    "gemma3_text": replace(
        GEMMA_2,
        defaults=GEMMA_2.defaults | {"vocab_size": 262208},
        caps_scores=False,
        caps_logits=False,
        query_key_norm="head",
        llama_cpp=replace(
            GGUF_GEMMA, architecture="gemma3", window_every=6, scales_like_27b=62, has_own_head=True
        ),
    ),
    "phi3": Family(
        tensor_parallel="products",
        defaults=_sizes(3072, 8192, 32, 32, None, 32064),
        fused=True,
        llama_cpp=LlamaCpp(architecture="phi3", stretches_rope=("longrope",), rotates_parts=True),
    ),
    "granite": LLAMA,
    "smollm3": replace(
        LLAMA,
        defaults=_sizes(2048, 11008, 36, 16, 4, 128256),
        tied=True,
        llama_cpp=LlamaCpp(architecture="smollm3", rotates_neighbors=True, rope_skipped_every=4),
    ),
    "olmo2": replace(OLMO_2, tensor_parallel="products"),
    "olmo3": OLMO_2,
    "mixtral": Family(
        defaults=_sizes(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        mixture=MixtureKeys(experts="num_local_experts", intermediate="intermediate_size"),
        llama_cpp=replace(GGUF_LLAMA, biases=()),
        vllm_modules={"mlp": ("block_sparse_moe",)},
    ),
    "olmoe": Family(
        defaults=_sizes(2048, 2048, 16, 16, None, 50304, num_experts=64, num_experts_per_tok=8),
        query_key_value_bias="attention_bias",
        query_key_norm="all",
        mixture=MixtureKeys(intermediate="intermediate_size"),
    ),
    "qwen2_moe": replace(
        QWEN_2,
        defaults=_sizes(2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4)
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        mixture=MixtureKeys(shared="shared_expert_intermediate_size", some_are_dense=True),
    ),
    "qwen3_moe": replace(
        QWEN_3,
        defaults=_sizes(2048, 6144, 24, 32, 4, 151936, num_experts=128, num_experts_per_tok=8)
        | {"moe_intermediate_size": 768},
        mixture=MixtureKeys(some_are_dense=True),
        llama_cpp=LlamaCpp(architecture="qwen3moe"),
    ),
    "glm4_moe": Family(
        defaults=_sizes(4096, 10944, 46, 96, 8, 151552, n_routed_experts=128, n_shared_experts=1)
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        query_key_value_bias="attention_bias",
        output_bias=False,
        query_key_norm="head",
        query_key_norm_key="use_qk_norm",
        mixture=SHARED_EXPERTS,
    ),
    "deepseek_v3": Family(
        defaults=_sizes(
            7168, 18432, 61, 128, None, 129280, n_routed_experts=256, n_shared_experts=1
        )
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        query_key_value_bias="attention_bias",
        latent_attention=True,
        mixture=SHARED_EXPERTS,
    ),
    "gpt_oss": Family(
        defaults=_sizes(
            2880, 2880, 36, 64, 8, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4
        ),
        query_key_value_bias="attention_bias",
        attention_bias=True,
        sinks=True,
        norm_keeps_fp32=True,
        mixture=MixtureKeys(
            experts="num_local_experts",
            intermediate="intermediate_size",
            router="router",
            has_biases=True,
            gate_tensors=6,
            gates_itself=True,
        ),
    ),
    "qwen2_5_vl_text": replace(
        QWEN_2, is_of_vision=True, defaults=_sizes(8192, 29568, 80, 64, 8, 152064)
    ),
    "qwen3_vl_text": replace(QWEN_3, is_of_vision=True),
    "qwen3_vl_moe_text": replace(
        QWEN_3,
        is_of_vision=True,
        defaults=_sizes(2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4)
        | {"moe_intermediate_size": 1408},
        mixture=MixtureKeys(some_are_dense=True),
    ),
    # Families whose layers the plan does not know.
    **dict.fromkeys(("nemotron", "stablelm"), Family(drops_arguments=True)),
    **dict.fromkeys(("doge", "gpt_neox_japanese"), BY_MASK),
    "phimoe": replace(BY_MASK, unadaptable=("router",)),
    # attention knows documents by a mask, and by an index
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), BY_MASK),
    **dict.fromkeys(("falcon", "xglm"), BY_OUR_MASK),
    **dict.fromkeys(("codegen", "gptj"), replace(BY_MASK, has_position_table=True)),
    "gpt_neo": replace(BY_MASK, has_position_table=True, bounds_rows=True),
    "mpt": replace(BY_OUR_MASK, has_position_table=True, bounds_rows=True),  # a table of biases
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"),
        replace(BY_OUR_MASK, counts_positions=True, has_position_table=True),
    ),
    **dict.fromkeys(
        ("bigbird_pegasus", "mvp", "openai-gpt", "trocr", "whisper"),
        replace(BY_TABLE, counts_positions=True),
    ),
    **dict.fromkeys(("biogpt", "ctrl", "gpt_bigcode", "gpt2", "opt", "xlm"), BY_TABLE),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DELTA_NET),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), MAMBA_2),
    **dict.fromkeys(("mamba2", "nemotron_h"), _forbid_sampling(MAMBA_2)),
    "zamba2": replace(
        _forbid_sampling(MAMBA_2), unadaptable=("conv1d", "out_proj", *OF_SHARED_BLOCKS)
    ),
    **dict.fromkeys(("mamba", "falcon_mamba"), _forbid_sampling(MAMBA)),
    "jamba": replace(MAMBA, unadaptable=("conv1d", "dt_proj")),
    "zamba": replace(MAMBA, unadaptable=("conv1d", *OF_SHARED_BLOCKS)),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), CONVOLUTION),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), DELTA_ATTENTION),
    "recurrent_gemma": replace(
        BY_MASK, recurrence=Recurrence(modules=("RecurrentBlock",), can_be_sampled=False)
    ),
    "minimax": Family(recurrence=Recurrence(modules=("LightningAttention",), can_be_sampled=False)),
    "zaya": Family(recurrence=Recurrence(modules=("CCAProjection",))),
    "reformer": Family(has_axial_positions=True),
    "rwkv": Family(
        recurrence=Recurrence(modules=("SelfAttention", "FeedForward"), can_be_sampled=False)
    ),
    "xlstm": Family(recurrence=Recurrence(modules=("xLSTMLayer",), can_be_sampled=False)),
    "glm4": Family(vllm_modules={"gate_up_proj": ("gate_proj", "up_proj")}),
    "llama4_text": Family(unadaptable=("router",)),
    "deepseek_v4": Family(unadaptable=("o_a_proj",)),  # it has a product for each group of heads
    # the weight of this layer is read without a call
    "gemma3n_text": Family(unadaptable=("correction_coefs",)),
    "longcat_flash": Family(unadaptable=("classifier",)),
    "mllama_text_model": Family(rows_beyond_head=8),
    "deepseek_v2": Family(mixture=SHARED_EXPERTS),
    "granitemoe": Family(
        mixture=MixtureKeys(experts="num_local_experts", intermediate="intermediate_size")
    ),
    # Whole vision-language models.
    "gemma3": Family(takes_images=True, images_see_themselves=True),
    "gemma3n": replace(WITH_IMAGES, embedders_read_all_tokens=True),
    **dict.fromkeys(("gemma4", "glm4v", "glm46v", "idefics3", "internvl", "llava"), WITH_IMAGES),
    **dict.fromkeys(("llama4", "llava_next", "smolvlm"), WITH_IMAGES),
    "mllama": Family(takes_images=True, images_are_read_across=True),
    "mistral3": replace(WITH_IMAGES, untied_in_files=True),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        WITH_IMAGES,
    ),
}
IMAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.takes_images]
PLANNED = [name for name, family in FAMILIES.items() if family.is_planned]


def find_family(model_type: str) -> Family:
    """Returns the row of a family; `Family()` if it has none."""
    return FAMILIES.get(model_type, Family())
