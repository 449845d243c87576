"""The table of features that cannot be combined in one run, with the reasons. Imports no torch."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from finetune.config.families import find_family
from finetune.config.model_rules import is_uneven_vocabulary, trains_experts
from finetune.config.optimization import DEFAULT_OPTIMIZER, OPTIMIZERS
from finetune.config.quantization import LOAD_KEYS
from finetune.config.recipe_rules import QAT, has_qat
from finetune.config.rule import (
    BF16,
    Case,
    Condition,
    NotKnown,
    Rule,
    all_of,
    has_ep,
    has_fp8,
    has_pp,
    has_sp,
    has_tp,
    is_fsdp1,
    is_quantized,
    is_set,
    samples,
    samples_itself,
)
from finetune.config.schema import recipe_keys
from finetune.constants import Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that a run may do, as one side of an exclusion."""

    name: str  # in messages; `{key}` in it is replaced by the value of a Case
    keys: Names  # the keys of the recipe or the Accelerate file that ask for it
    is_on: Condition  # whether a case does it
    otherwise: str = ""  # advice: how to do without it
    off: Mapping[str, Any] | None = None  # keys with the values that turn it off; None: unknown
    of_teacher: bool = False  # whether the teacher may do it too


def _asks(key: str) -> Condition:
    """Makes the condition that a recipe key asks for something.

    A key that is off by default (null, false, 0 or empty) is off with each of these values.
    """
    if recipe_keys()[key].default:
        return is_set(key)
    return lambda case: case[key]


def _layout_feature(
    name: str, is_on: Condition, otherwise: str = "", off: Mapping[str, Any] | None = None
) -> Feature:
    """Makes a feature of the layout. `name`: `key` or `key: value` of the Accelerate file."""
    key, _, _ = name.partition(":")
    return Feature(name=name, keys=(key,), is_on=is_on, otherwise=otherwise, off=off)


def _recipe_feature(
    key: str, is_on: Condition, otherwise: str = "", off: Any = ..., name: str = ""
) -> Feature:
    """Makes a feature that some values of one recipe key ask for.

    Args:
        key: The key of the recipe.
        is_on: Whether the key's value in a case asks for the feature.
        otherwise: Advice; empty: to remove the key.
        off: The value of the key that turns the feature off; `...`: none is known.
        name: The feature in messages; empty: the key and its value.
    """
    return Feature(
        name=name or f"{key}: {{{key}}}",
        keys=(key,),
        is_on=is_on,
        otherwise=otherwise or f"remove {key}",
        off=None if off is ... else {key: off},
    )


def _method_feature(is_on: Condition, otherwise: str = "") -> Feature:
    """Makes a feature that some values of `method` have."""
    return Feature(name="method: {method}", keys=("method",), is_on=is_on, otherwise=otherwise)


def _model_feature(name: str, is_on: Condition, otherwise: str = "") -> Feature:
    """Makes a feature of the model that the recipe names."""
    return Feature(name=name, keys=("model_name_or_path",), is_on=is_on, otherwise=otherwise)


def _freezes_parameters(case: Case) -> bool:
    """Whether some parameters of the model are not trained."""
    return case["use_peft"] or bool(case["frozen_modules"] or case["trainable_modules"])


def _is_fsdp1_without_shards(case: Case) -> bool:
    return is_fsdp1(case) and (case.layout.strategy == "NO_SHARD" or case.ranks == 1)


HEAD_ADAPTER = "LoRA on the head"
KEPT = "activation_checkpointing_keeps"
KEPT_PRODUCTS = "attention_and_projections"

# A name in EXCLUSIONS -> the feature. A name in EXCLUSIONS that is not here is a key of the recipe,
# and the feature is what the key asks for (`_asks`).
FEATURES: Mapping[str, Feature] = {
    # The layout
    "fsdp_version: 1": _layout_feature("fsdp_version: 1", is_fsdp1, "set fsdp_version: 2"),
    "FSDP1 without shards": Feature(
        name="FSDP1 with NO_SHARD or one rank",
        keys=("fsdp_sharding_strategy",),
        is_on=_is_fsdp1_without_shards,
        otherwise="use ddp, or for one rank accelerate_config: single, or set fsdp_version: 2",
    ),
    "a CPU": Feature(name="a run on a CPU", keys=(), is_on=lambda c: c.machine.device == "cpu"),
    "distributed_type: MULTI_GPU": _layout_feature(
        "distributed_type: MULTI_GPU",
        lambda c: c.layout.layout == "ddp",
        "use FSDP2 or one process",
    ),
    "fsdp_offload_params": _layout_feature("fsdp_offload_params", lambda c: c.layout.cpu_offload),
    "fsdp_auto_wrap_policy": _layout_feature(
        "fsdp_auto_wrap_policy: {layout.wrapping}",
        lambda c: c.layout.wrapping != "TRANSFORMER_BASED_WRAP",
        "set TRANSFORMER_BASED_WRAP",
    ),
    "mixed_precision: fp16": _layout_feature(
        "mixed_precision: fp16", lambda c: c.precision == "fp16", "set mixed_precision: bf16", BF16
    ),
    "mixed_precision: fp8": _layout_feature(
        "mixed_precision: fp8", has_fp8, "set mixed_precision: bf16", BF16
    ),
    "tp_size": _layout_feature("tp_size", has_tp, "set tp_size: 1", {"tp_size": 1}),
    "cp_size": _layout_feature("cp_size", has_sp, "set cp_size (or sp_size) to 1", {"cp_size": 1}),
    "expert_parallel_size": _layout_feature(
        "expert_parallel_size", has_ep, "set expert_parallel_size: 1", {"expert_parallel_size": 1}
    ),
    "pipeline_parallel_size": _layout_feature(
        "pipeline_parallel_size",
        has_pp,
        "set pipeline_parallel_size: 1",
        {"pipeline_parallel_size": 1},
    ),
    # The method
    "a teacher": _method_feature(lambda c: c.method_facts.needs_teacher),
    "a reference": Feature(
        name="beta: {beta}",
        keys=("beta", "method"),
        is_on=lambda c: c.recipe.has_reference and c.recipe.trains_base,
        otherwise="set beta: 0, or train new adapters alone",
        off={"beta": 0.0},
    ),
    "sampled completions": _method_feature(samples),
    "sampling by the model itself": _method_feature(samples_itself, "set vllm_server_base_url"),
    "compared answers": _method_feature(lambda c: c.method_facts.compares),
    "rated answers": _method_feature(lambda c: c.method_facts.rows == "ratings"),
    "no text": _method_feature(lambda c: not c.method_facts.writes_text),
    "embeddings": _method_feature(lambda c: c.method_facts.embeds),
    "masked tokens": _method_feature(lambda c: c.method_facts.masks),
    "early exits": _method_feature(lambda c: c.method_facts.exits),
    "a critic": _method_feature(lambda c: c.method_facts.has_critic),
    "vllm_server_base_url": _recipe_feature(
        "vllm_server_base_url",
        lambda c: samples(c) and c["vllm_server_base_url"] is not None,
        name="vllm_server_base_url",
    ),
    # The model
    "a vision-language model": _model_feature(
        "the vision-language model {name}", lambda c: c.is_whole, "name a language model"
    ),
    "rows with images": Feature(
        name="rows with images",
        keys=("datasets",),
        is_on=lambda c: c.images,
        otherwise="remove these rows",
    ),
    "images that are read across": _model_feature(
        "rows with images, which {images} reads by cross attention,",
        lambda c: c.images and find_family(c.images).images_are_read_across,
        "name another model",
    ),
    "a stored quantization": _model_feature(
        "a quantized base", lambda c: c.model.quantization is not None, "name the unquantized model"
    ),
    "a dense model": _model_feature(
        "the dense model {name} ({model.model_type})", lambda c: not c.model.experts
    ),
    "routers without an auxiliary loss": _model_feature(
        "{name}, whose routers have no auxiliary loss ({model.model_type})",
        lambda c: c.model.experts and not c.model.has_auxiliary_loss,
    ),
    "a mixture of experts": _model_feature("a mixture of experts", lambda c: c.model.experts),
    "recurrent layers": _model_feature(
        "recurrent layers", lambda c: c.model.family.recurrence is not None
    ),
    "dropout of the model": _model_feature(
        "{model.dropout} in the config of {name}",
        lambda c: c.model.dropout and not c["attention_dropout"],
        "set attention_dropout: 0, and other keys to 0 in a copy of its config.json",
    ),
    "trained experts": _model_feature("trained experts", trains_experts),
    "an uneven vocabulary": Feature(
        name="an uneven vocabulary", keys=("tp_size",), is_on=is_uneven_vocabulary
    ),
    "a quantized base": Feature(
        name="{load_key}",
        keys=LOAD_KEYS,
        is_on=is_quantized,
        otherwise="name an unquantized model without the key",
        of_teacher=True,
    ),
    # The recipe
    KEPT_PRODUCTS: _recipe_feature(
        KEPT, is_set(KEPT, KEPT_PRODUCTS), f"set {KEPT}: attention", "attention"
    ),
    QAT: _recipe_feature(QAT, has_qat, off=None),
    "attention_dropout": _recipe_feature(
        "attention_dropout", lambda c: c["attention_dropout"], "set attention_dropout: 0", 0.0
    ),
    "attn_implementation": _recipe_feature(
        "attn_implementation", is_set("attn_implementation"), off="auto"
    ),
    "eaft": _recipe_feature("token_loss", is_set("token_loss", "eaft"), "set token_loss: dft"),
    "token_loss": _recipe_feature("token_loss", is_set("token_loss")),
    "optim_offload: nvme": _recipe_feature(
        "optim_offload", is_set("optim_offload", "nvme"), off="none"
    ),
    "max_grad_norm": _recipe_feature(
        "max_grad_norm",
        lambda c: c["max_grad_norm"] is not None,
        "set max_grad_norm: null",
        None,
        name="max_grad_norm",
    ),
    "on_nonfinite: skip": _recipe_feature(
        "on_nonfinite", is_set("on_nonfinite", "skip"), "set on_nonfinite: stop", "stop"
    ),
    "frozen parameters": Feature(
        name="frozen parameters (LoRA's base, frozen_modules)", keys=(), is_on=_freezes_parameters
    ),
    "overlength: split": _recipe_feature(
        "overlength", is_set("overlength", "split"), "set overlength: truncate, drop or error"
    ),
    "cut documents": _recipe_feature(
        "overlength",
        lambda c: c["overlength"] in ("truncate", "split"),
        "set overlength: drop or error",
    ),
    "adapter_name_or_path": _recipe_feature(
        "adapter_name_or_path",
        is_set("adapter_name_or_path"),
        "merge it into its base (finetune export ADAPTER --output FOLDER) and name FOLDER in "
        "model_name_or_path",
        None,
        name="adapter_name_or_path",
    ),
    "other formats": _recipe_feature(
        "export_formats",
        lambda c: c["export_formats"] != ("safetensors",),
        "set export_formats: [safetensors]",
        name="export_formats",
    ),
    "max_staleness": _recipe_feature(
        "max_staleness",
        lambda c: samples(c) and c["max_staleness"],
        "set max_staleness: 0",
        0,
        name="max_staleness",
    ),
    "routing_replay": _recipe_feature(
        "routing_replay",
        lambda c: samples(c) and c["routing_replay"],
        "set routing_replay: false",
        False,
        name="routing_replay",
    ),
    "model_config": _recipe_feature(
        "model_config",
        is_set("model_config"),
        "save the model with its random weights first",
        name="model_config",
    ),
    "a checkpoint's path": _recipe_feature(
        "resume_from_checkpoint",
        lambda c: c["resume_from_checkpoint"] not in ("auto", "none"),
        "set resume_from_checkpoint: auto",
        "auto",
    ),
    # pipeline_parallel_size again, by the recipe alone: the layout may be unknown
    "a pipeline": _recipe_feature(
        "pipeline_parallel_size",
        is_set("pipeline_parallel_size"),
        off=1,
        name="pipeline_parallel_size",
    ),
    HEAD_ADAPTER: Feature(
        name="an adapter on the output head",
        keys=("lora_target_modules",),
        is_on=lambda c: c["use_peft"] and c.recipe.lora.adapts_head,
        otherwise="leave the head out of lora_target_modules",
    ),
    "adapters of added_tokens": Feature(
        name="added_tokens with use_peft",
        keys=("added_tokens", "use_peft"),
        is_on=all_of(is_set("use_peft"), is_set("added_tokens")),
        otherwise="remove added_tokens",
    ),
}

# Reasons that several rows share.
OFF_POLICY = (
    "the model that learns would not be the one that was sampled, and the probability ratio is no "
    "longer 1"
)
OF_COMPLETIONS = "completions are all that is trained on"
COMPARED = "it compares answers to one prompt"
NO_PREDICTION = "a document is read to its end, and none of its tokens is predicted"
NO_TEXT = "it trains a model that writes no text"
NO_NEXT_TOKEN = "it trains a model that fills in masked tokens, and writes none after another"
LORA_FREEZES = "LoRA freezes the base but for modules_to_save"
NO_ADAPTERS = "vLLM loads no such adapters"
BOTH_ENDS = "no rank has both ends of the model"
TWICE = (
    "each document is computed twice, once for the loss of the whole step and once for its own "
    "gradient, and "
)

# A feature -> the features that it cannot be combined with -> the reason. Empty: it was not tried.
EXCLUSIONS: Mapping[str, Mapping[str, str]] = {
    # The layout
    "fsdp_version: 1": {
        "a teacher": "FSDP1 gathers no single unit, as the teacher's head needs it",
        "a reference": "FSDP1 gathers no single unit, as the reference's head needs it",
        "a quantized base": "FSDP1 flattens and converts the parameters of a layer together, which "
        "corrupts quantized ones",
        "lora_target_parameters": "FSDP1 flattens the parameters of a layer together, so that none "
        "of them can have an adapter of its own",
        "optim_in_backward": "FSDP1 flattens parameters together",
    },
    "FSDP1 without shards": {"frozen parameters": "", "a vision-language model": ""},
    "a CPU": {
        "use_liger_kernel": "Liger's kernels run on CUDA only",
        "activation_offload": "activations are in host memory already",
        "mixed_precision: fp16": "",
    },
    "distributed_type: MULTI_GPU": {"optim_in_backward": "DDP keeps every gradient in its buckets"},
    "fsdp_offload_params": {
        "optim_in_backward": "under CPU offload gradients are in host memory already"
    },
    "mixed_precision: fp16": {
        "optim_in_backward": "all gradients are checked for overflow before the first update",
        "optim_offload: nvme": "it has no loss scaler",
    },
    "mixed_precision: fp8": {
        "a quantized base": "a base in {quantization.bits} bits is multiplied in bf16 only",
        "a mixture of experts": "torchao does not multiply experts in FP8",
        "use_dora": "DoRA measures the rows of the frozen weights, which are rounded to FP8 here",
        "oft_block_size": "",
        "optim_in_backward": "",
        "optim_offload: nvme": "",
    },
    "tp_size": {
        "mixed_precision: fp16": "",
        "mixed_precision: fp8": "",
        "fsdp_auto_wrap_policy": "",
        "expert_parallel_size": "ranks that divide a layer's matrices have the same tokens, and "
        "would send each expert all of them",
        "a vision-language model": "",
        "a teacher": "",
        "a reference": "",
        "a quantized base": "torch divides a layer by its weight, and a quantized layer has codes "
        "and scales instead",
        QAT: "a scale is that of a part of a row that one rank holds",
        "use_dora": "peft adds DoRA's magnitudes, which are whole on each rank, to products that "
        "are divided",
        "oft_block_size": "the inputs that are rotated are divided",
        "eaft": "no rank has all scores of a token",
        "neftune_noise_alpha": "",
        "attn_implementation": "",
        KEPT_PRODUCTS: "it finds its products by their sizes, and each rank has a shard",
        "activation_offload": "what a layer keeps of divided products is not copied",
        "torch_compile": "inductor does not end in a layer of divided matrices (torch 2.13)",
        "use_liger_kernel": "its kernels do not take divided matrices",
        "optim_in_backward": "a gradient's norm is of a mesh of its own, known after the backward",
    },
    "cp_size": {
        "mixed_precision: fp8": "",
        "a vision-language model": "",
        "distill_top_k": "a rank has a part of a row's tokens, and what the teacher has said is "
        "stored by whole examples",
        "attn_implementation": "only the packed attention that is built in works where ranks share "
        "a row",
        "activation_offload": "",
        "optim_in_backward": "",
    },
    "expert_parallel_size": {
        "mixed_precision: fp16": "",
        "mixed_precision: fp8": "",
        "activation_offload": "",
        "torch_compile": "within a layer the host reads how many tokens come from each rank",
        "optim_in_backward": "",
    },
    "pipeline_parallel_size": {
        "mixed_precision: fp16": "",
        "mixed_precision: fp8": "",
        "a teacher": "a teacher's layers are not in the pipeline",
        "a reference": "a reference's layers are not in the pipeline",
        "modules_to_save": BOTH_ENDS,
        "oft_block_size": "",
        "adapters of added_tokens": BOTH_ENDS,
        "optim_in_backward": "a step has several micro-batches",
        "optim_offload: nvme": "",
    },
    # The method
    "compared answers": {
        "overlength: split": "the answers would be cut apart",
        "assistant_only_loss": COMPARED,
        "turns": COMPARED,
        "train_on_reasoning": COMPARED,
    },
    "sampled completions": {
        "neftune_noise_alpha": OFF_POLICY,
        "lora_dropout": OFF_POLICY,
        "attention_dropout": OFF_POLICY,
        "dropout of the model": OFF_POLICY,
        "streaming": "a step draws its prompts by number",
        "exact_match_samples": "held-out prompts are answered and rewarded at every evaluation "
        "anyway",
        "optim_in_backward": "how many micro-batches completions fill is known only once they are "
        "sampled",
        "assistant_only_loss": OF_COMPLETIONS,
        "turns": OF_COMPLETIONS,
        "train_on_reasoning": OF_COMPLETIONS,
        "cut documents": "the question that is asked would be cut",
        "images that are read across": "they are sampled from a cache that keeps none of it",
        "cp_size": "the ratio of a sequence is not summed over its ranks",
    },
    "sampling by the model itself": {
        "fsdp_version: 1": "it cannot keep the model gathered while it samples",
        "expert_parallel_size": "ranks sample completions of different lengths, and would wait for "
        "each other's tokens",
        "mixed_precision: fp8": "one token at a time has too few rows for FP8's products",
        "max_staleness": "it cannot sample while it trains",
    },
    "a critic": {
        "tp_size": "",
        "pipeline_parallel_size": "a stage cannot compute a whole forward, as values need it",
        "mixed_precision: fp16": "",
        "vllm_server_base_url": "",
        "routing_replay": "",
        "a vision-language model": "",
        "optim_offload: nvme": "",
        QAT: "",
        "torch_compile": "",
    },
    "routing_replay": {
        "vllm_server_base_url": "a server's answer does not hold the experts that it has chosen",
        "tools": "what tools have answered is read again with each turn",
        "environment": "what a world has answered is read again with each turn",
        "torch_compile": "a compiled layer chooses within its graph",
        "tp_size": "",
        "pipeline_parallel_size": "",
        "a vision-language model": "",
    },
    "vllm_server_base_url": {
        "model_config": "it starts from a model's files",
        "use_dora": NO_ADAPTERS,
        "oft_block_size": NO_ADAPTERS,
        "modules_to_save": NO_ADAPTERS,
        "adapters of added_tokens": NO_ADAPTERS,
        "lora_target_parameters": NO_ADAPTERS,
        HEAD_ADAPTER: "",
    },
    "no text": {
        "sample_prompts": NO_TEXT,
        "exact_match_samples": NO_TEXT,
        "eot_tokens": NO_TEXT,
        "train_mtp": NO_TEXT,
        "assistant_only_loss": NO_PREDICTION,
        "turns": NO_PREDICTION,
        "train_on_reasoning": NO_PREDICTION,
        "cut documents": "a document that is cut has lost the token that is read",
        "other formats": "other formats have neither a head of scores nor pooling",
        "tp_size": "it divides the head by its vocabulary",
    },
    HEAD_ADAPTER: {
        "use_dora": "DoRA divides by norms of base and adapter together, which a loss in chunks "
        "never adds up",
        "oft_block_size": "",
        "a critic": "",
    },
    "embeddings": {
        HEAD_ADAPTER: NO_PREDICTION,
        "streaming": "the documents of a step are drawn from all rows",
        "neftune_noise_alpha": f"{TWICE}the noise would be another",
        "a pipeline": f"{TWICE}a stage cannot compute a whole forward",
    },
    "masked tokens": {
        "sample_prompts": NO_NEXT_TOKEN,
        "exact_match_samples": NO_NEXT_TOKEN,
        "other formats": NO_NEXT_TOKEN,
        "attn_implementation": "only the attention that is built in sees what is after a token",
        "cp_size": "a token and the state that predicts it may be on two ranks",
        "pipeline_parallel_size": "the first stage would read the tokens unmasked",
        "a vision-language model": "it reads text alone",
        "a mixture of experts": "the balance of its routers is counted on unmasked tokens",
        "recurrent layers": "they carry a state in one direction",
    },
    "early exits": {
        "pipeline_parallel_size": "the head is on the last rank, and other ranks have the layers",
        "a vision-language model": "",
    },
    "layer_dropout": {
        "a mixture of experts": "the balance of its routers is counted on all tokens"
    },
    "distill_top_k": {"streaming": "the teacher is asked of all data before training"},
    "a reference": {
        "model_config": "the reference is read from files, which have no random weights",
        "added_tokens": "the reference is read from files, which have none of them",
        "adapter_name_or_path": "the reference is read from the base's files, without the adapter",
    },
    # The model
    "a vision-language model": {
        "no text": "it reads text alone",
        "use_liger_kernel": "Liger's kernels were not tried with its class",
    },
    "routers without an auxiliary loss": {"router_aux_loss_coef": ""},
    "a dense model": {"router_aux_loss_coef": "", "routing_replay": "", "expert_parallel_size": ""},
    "a mixture of experts": {
        KEPT_PRODUCTS: "experts multiply matrices of the same sizes as attention's"
    },
    "rows with images": {
        "drop_vision": "they need the vision tower",
        "a teacher": "",
        "rated answers": "",
        "vllm_server_base_url": "a server reads images in a conversation of its own making, whose "
        "ids would not be those that are trained",
        "tools": "",
        "environment": "",
        "torch_compile": "",
    },
    # The recipe
    "eval_datasets": {"eval_split_size": "both name the held-out rows"},
    "streaming": {
        "eval_split_size": "no rows are held out of a stream; eval_datasets can name some"
    },
    "load_in_4bit": {"load_in_8bit": "both say how the base is kept"},
    "use_peft": {
        "trainable_modules": LORA_FREEZES,
        "frozen_modules": LORA_FREEZES,
        "drop_vision": "adapters are opened on the checkpoint, whose own class has other names for "
        "their layers",
    },
    "adapters": {
        "fsdp_version: 1": "FSDP1 flattens the parameters of a base into memory of its own",
        "mixed_precision: fp16": "its loss scaler would continue from the adapter before",
        "a checkpoint's path": "each adapter has checkpoints of its own",
        **dict.fromkeys(
            (
                "fsdp_offload_params",
                "mixed_precision: fp8",
                "tp_size",
                "cp_size",
                "expert_parallel_size",
                "pipeline_parallel_size",
                "sampled completions",
                "a teacher",
                "no text",
                "masked tokens",
                "a vision-language model",
                "a mixture of experts",
                "adapters of added_tokens",
                QAT,
                "torch_compile",
                "optim_in_backward",
                "optim_offload: nvme",
            ),
            "",
        ),
    },
    QAT: {
        "load_in_4bit": "the base is quantized already, and what is trained is not merged into it",
        "load_in_8bit": "the base is quantized already, and what is trained is not merged into it",
        "a stored quantization": "the base is quantized already",
        "use_dora": "only plain adapters are added to the weight that is rounded",
        "oft_block_size": "only plain adapters are added to the weight that is rounded",
        "lora_dropout": "base and adapter are rounded together, so that the adapter has no input "
        "of its own",
        "lora_target_parameters": "only adapters of linear layers are added to the weight that is "
        "rounded",
        "sampled completions": "one rounded input more or less changes a ratio of probabilities, "
        "which must begin at 1",
        "mixed_precision: fp8": "both replace the products of the same layers",
        "a mixture of experts": "torchao quantizes linear layers, and the experts of a layer are "
        "one parameter",
        "recurrent layers": "their kernels read weights of linear layers past the rounding",
    },
    "lora_target_parameters": {
        "use_dora": "peft has no DoRA for them",
        "lora_dropout": "an adapter of them has no input of its own to drop from",
    },
    "use_dora": {
        KEPT_PRODUCTS: "DoRA's adapters multiply matrices of the same sizes as attention's"
    },
    "oft_block_size": {
        **dict.fromkeys(
            ("lora_dropout", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
            "it rotates inputs, and adds no products of a rank",
        ),
        "lora_target_parameters": "peft rotates the inputs of linear layers alone",
        "a quantized base": "",
        "torch_compile": "",
    },
    "token_loss": {"label_smoothing": ""},
    "optim_in_backward": {
        "max_grad_norm": "it clips by the norm of all gradients, which is known only after the "
        "updates",
        "on_nonfinite: skip": "it leaves out a whole step, of which a part has been made when a "
        "gradient is found that is not finite",
        "optim_offload: nvme": "it updates one layer after another when all gradients are there, "
        "not before",
    },
    "optim_offload: nvme": {
        "async_save": "it copies the state to host memory, out of which offloading keeps it"
    },
}


def find_feature(name: str) -> Feature:
    """Returns the feature that EXCLUSIONS names: one of FEATURES, or what a recipe key asks for."""
    if name in FEATURES:
        return FEATURES[name]
    default = recipe_keys()[name].default
    return _recipe_feature(name, _asks(name), off=default, name=name)


def _exclude(name: str, other_name: str, why: str) -> Rule:
    """Makes the rule that two features cannot be combined.

    `why`: the reason for the message; empty: it gives none.
    """
    feature = find_feature(name)
    other = find_feature(other_name)
    # The problem's place may be the recipe, so the message names the Accelerate file too.
    is_in_file = other.keys and other.keys[0] not in recipe_keys()
    place = " ({layout.source})" if is_in_file else ""
    reason = f": {why}" if why else ""
    return Rule(
        name=f"{name} with {other_name}",
        keys=(*feature.keys, *other.keys),
        of_teacher=feature.of_teacher or other.of_teacher,
        when=all_of(feature.is_on, other.is_on),
        message=f"{feature.name} cannot be combined with {other.name}{place}{reason}",
        advice=", or ".join(filter(None, (feature.otherwise, other.otherwise))),
        fix=feature.off or other.off,
    )


def _require_fsdp2(name: str) -> Rule:
    """Makes the rule that a feature requires the layout FSDP2."""
    feature = find_feature(name)
    return Rule(
        name=f"{name} without FSDP2",
        keys=(*feature.keys, "fsdp_version"),
        when=all_of(feature.is_on, lambda case: case.layout.layout != "fsdp2"),
        message=f"{feature.name} requires FSDP2, and {{layout.source}} is another layout",
        advice=f"use fsdp_full_shard_auto, or {feature.otherwise}",
        fix=feature.off,
    )


def _exclude_optimizers(name: str) -> Rule:
    """Makes the rule that the feature `name` excludes the optimizers whose rows say so."""
    feature = find_feature(name)

    def advise(case: Case) -> str:
        """Names the optimizers that can be combined with all features of the case."""
        features_on = set()
        for other_name in NOT_FOR_ALL_OPTIMIZERS:
            with suppress(NotKnown):
                if find_feature(other_name).is_on(case):
                    features_on.add(other_name)
        optimizers = [
            optimizer
            for optimizer, row in OPTIMIZERS.items()
            if not features_on.intersection(row.conflicts)
        ]
        return f"set optim to one of {', '.join(optimizers)}"

    def conflicts(case: Case) -> bool:
        return name in OPTIMIZERS[case["optim"]].conflicts and bool(feature.is_on(case))

    return Rule(
        name=f"optim with {name}",
        keys=("optim", *feature.keys),
        when=conflicts,
        message=lambda case: (
            f"optim: {case['optim']} cannot be combined with {name}: "
            f"{OPTIMIZERS[case['optim']].conflicts[name]}"
        ),
        advice=advise,
        fix={"optim": DEFAULT_OPTIMIZER},
    )


REQUIRING_FSDP2 = ("expert_parallel_size", "pipeline_parallel_size", "optim_offload: nvme")
# The features that some optimizer cannot be combined with, each once.
NOT_FOR_ALL_OPTIMIZERS = tuple(
    dict.fromkeys(name for row in OPTIMIZERS.values() for name in row.conflicts)
)
RULES: tuple[Rule, ...] = (
    *(
        _exclude(excluded, feature, why)
        for feature, reasons in EXCLUSIONS.items()
        for excluded, why in reasons.items()
    ),
    *map(_require_fsdp2, REQUIRING_FSDP2),
    *map(_exclude_optimizers, NOT_FOR_ALL_OPTIMIZERS),
)
