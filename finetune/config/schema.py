"""The recipe: every key, its type, its default and its help, once. No torch here, so that a check answers at once.

A recipe file is flat; the classes below only say which package reads which key. `Recipe` gathers them:
`recipe.optimization.learning_rate` is the file's `learning_rate`. The string in each annotation is the key's help,
the documentation page and `--help` are made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from finetune.config.markers import NO_IN_YAML, ModulePatterns, Positive, ReadAs, StepsOrShare
from finetune.config.markers import FileOrName as FileOrName
from finetune.config.markers import SameOnResume as SameOnResume
from finetune.config.methods import METHODS, MethodFacts
from finetune.config.methods import Method as Method
from finetune.recipe.data_schema import Data as Data
from finetune.recipe.data_schema import DatasetSource as DatasetSource
from finetune.recipe.lora_schema import Lora as Lora
from finetune.recipe.lora_schema import Quantization as Quantization
from finetune.recipe.optimization_schema import Optimization as Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model is trained, and from what."""

    model_name_or_path: Annotated[
        str | None, FileOrName, SameOnResume, "A hub name or a local folder with config.json and safetensors."
    ] = None
    model_config: Annotated[
        dict[str, Any] | None,
        SameOnResume,
        "An inline architecture to train from random weights, as in config.json; model_type is required.",
    ] = None
    model_revision: Annotated[str | None, SameOnResume, "The hub revision of model_name_or_path."] = None
    tokenizer_name_or_path: Annotated[str | None, FileOrName, SameOnResume, "The tokenizer; null: the model's own."] = (
        None
    )
    added_tokens: Annotated[
        tuple[str, ...],
        SameOnResume,
        "Tokens added to the tokenizer, such as [TOOL]. Their rows in embedding and head start at the mean of the others and are "
        "trained; LoRA then trains both whole, as if modules_to_save named them.",
    ] = ()
    special_tokens: Annotated[
        dict[Literal["bos_token", "eos_token", "pad_token", "unk_token"], str] | None,
        SameOnResume,
        "The tokenizer's bos_token, eos_token, pad_token or unk_token, where others than its own are wanted; a token that it "
        "lacks is added.",
    ] = None
    eot_tokens: Annotated[
        tuple[str, ...],
        SameOnResume,
        "Tokens that end a turn, beside the eos_token: special ones, at which generation with the exported model stops.",
    ] = ()
    pad_vocab_to_multiple_of: Annotated[
        Positive,
        SameOnResume,
        "Where the tokens outgrow the embedding, it and the head get a multiple of this many rows.",
    ] = 64
    trust_remote_code: Annotated[bool, "Run code from the model's or tokenizer's repository."] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        SameOnResume,
        "The type of the trained parameters in memory, in every layout; LoRA's adapters are always float32. float32 keeps small updates; the compute dtype is the Accelerate config's.",
    ] = "float32"
    trainable_modules: Annotated[
        tuple[str, ...],
        ModulePatterns,
        SameOnResume,
        "Train these modules alone and freeze the rest, by patterns for the end of their names: lm_head, "
        "layers.[0-3].mlp, self_attn.*_proj. Empty: all. For full fine-tuning; under LoRA see modules_to_save.",
    ] = ()
    frozen_modules: Annotated[
        tuple[str, ...],
        ModulePatterns,
        SameOnResume,
        "Freeze these modules, by patterns as in trainable_modules, over which they prevail; tied weights are one tensor.",
    ] = ()
    attn_implementation: Annotated[
        Literal[
            "auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
        ],
        "auto: varlen attention on CUDA, or torch's flex_attention where a model caps its scores, has sinks or wide heads; "
        "causal SDPA per document on CPU; no flash-attn build is needed. flash_attention_3 "
        "and _4: the same with the kernels of the installed package, on Hopper and Blackwell; _3 without it takes the "
        "hub's kernels.",
    ] = "auto"
    torch_compile: Annotated[
        bool,
        "Compile the decoder layers' insides and the loss: faster steps for a minute more of the first start, worth it on a GPU.",
    ] = False
    tf32: Annotated[
        bool,
        SameOnResume,
        "On a GPU, multiply float32 matrices in TensorFloat-32: several times faster, with 10 bits of the mantissa. bf16 "
        "computation does not need it.",
    ] = False
    use_liger_kernel: Annotated[
        bool, "Liger's fused norms, rotary embeddings and MLPs on CUDA; needs the liger-kernel package."
    ] = False
    activation_checkpointing_every: Annotated[
        Positive, "Checkpoint every k-th decoder layer, where the Accelerate config turns activation checkpointing on."
    ] = 1
    activation_checkpointing_keeps: Annotated[
        Literal["nothing", "attention", "attention_and_projections"],
        "What a checkpointed layer keeps beside its input, instead of computing it again: the output of attention, whose "
        "computation grows with the length of documents; with the products round it (query, key, value, output). More "
        "memory, less time. Not with torch_compile.",
    ] = "nothing"
    activation_offload: Annotated[
        bool,
        "Keep what checkpointed layers keep (their inputs, and what activation_checkpointing_keeps names) in host memory until "
        "the backward, copied beside the computation; on CUDA, where the Accelerate config turns activation checkpointing on. "
        "Not with torch_compile.",
    ] = False
    attention_dropout: Annotated[
        float | None,
        Ge(0),
        Lt(1),
        SameOnResume,
        "Overrides the model's own attention dropout. With dropout, attention runs document by document on CUDA too, and scores that "
        "are capped, or have sinks, are materialized.",
    ] = None
    router_aux_loss_coef: Annotated[
        float | None,
        Ge(0),
        SameOnResume,
        "The weight of a mixture's auxiliary loss; null leaves it to the model's config.",
    ] = None
    expert_parallel_size: Annotated[
        Positive,
        "Divide the experts of a mixture's layers over groups of this many ranks, which send them their tokens; under FSDP2, which "
        "shards everything else over all ranks as before. 1: every rank gathers all experts of a layer.",
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many rows make a step, and how they are dealt out."""

    global_batch_size: Annotated[
        Positive | None,
        "Rows in an optimizer step over all ranks; set it and every number of ranks gives the same losses. null: "
        "per_device_train_batch_size x gradient_accumulation_steps x ranks.",
    ] = None
    per_device_train_batch_size: Annotated[Positive, "Rows in a micro-batch on one rank; sets the memory."] = 1
    gradient_accumulation_steps: Annotated[
        Positive | None,
        "Micro-batches in a step on one rank; null: as global_batch_size implies, else 1.",
    ] = None
    per_device_eval_batch_size: Annotated[Positive | None, "null: per_device_train_batch_size."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where it goes, how often it is looked at, how it is kept."""

    run_name: Annotated[str | None, "The run's name; null: the recipe's file name."] = None
    output_dir: Annotated[str | None, "The run's folder; null: runs/<run_name>."] = None
    accelerate_config: Annotated[str | None, FileOrName, "The Accelerate config where the command names none."] = None
    seed: Annotated[int, Ge(0), Lt(2**63), SameOnResume, "Of the weights, the data order and dropout."] = 42
    logging_steps: Annotated[StepsOrShare, "Steps between two lines of metrics; below 1 a share of the run."] = 10
    eval_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NO_IN_YAML,
        "When the held-out loss is measured between the start and the end: every eval_steps, after every epoch, or not at all.",
    ] = "steps"
    eval_steps: Annotated[
        StepsOrShare | None,
        "Steps between two held-out losses; below 1 a share of the run; null: only at the start and the end.",
    ] = None
    exact_match_samples: Annotated[
        int,
        Ge(0),
        "The number of held-out prompts answered greedily before and after training and compared with the reference.",
    ] = 0
    sample_prompts: Annotated[
        tuple[str, ...], "Prompts that are answered greedily at every evaluation, to be read; each is a user's turn."
    ] = ()
    early_stopping_patience: Annotated[
        Positive | None,
        "Stop after this many held-out losses in a row without a new minimum; needs eval_steps, or eval_strategy: epoch.",
    ] = None
    timeout_seconds: Annotated[float, Gt(0), "How long a rank waits for the others before the run is ended."] = 1800.0
    profile_steps: Annotated[
        tuple[Positive, Positive] | None,
        "First and last step to profile, 1-based, such as [11, 13]: a Chrome trace and a snapshot of GPU memory in profile/.",
    ] = None
    report_to: Annotated[
        Literal["none", "all", "tensorboard", "wandb", "mlflow", "trackio"]
        | tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...],
        "A tracker in addition to metrics.jsonl, or a list of them; all: every one that is installed.",
    ] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What survives the process."""

    save_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NO_IN_YAML,
        "When checkpoints are saved before the end: every save_steps, after every epoch, or not at all.",
    ] = "steps"
    save_steps: Annotated[
        StepsOrShare | None, "Steps between two checkpoints; below 1 a share of the run; null: only at the end."
    ] = None
    save_total_limit: Annotated[Positive | None, "Keep the N newest checkpoints; null: all."] = 2
    keep_every_steps: Annotated[
        Positive | None, "Also keep, permanently, every checkpoint whose step is a multiple of this."
    ] = None
    keep_best_checkpoint: Annotated[
        bool,
        "Save at every new minimum of the held-out loss (see eval_steps), keep the newest of those as well, and export it.",
    ] = False
    async_save: Annotated[
        bool | None,
        "Write checkpoints in the background, from a copy in host memory; null: on a GPU.",
    ] = None
    resume_from_checkpoint: Annotated[
        str,
        ReadAs(True, "auto"),
        "auto: the newest checkpoint of output_dir that verifies; none: start over; or a checkpoint's path.",
    ] = "auto"
    allow_changed_recipe: Annotated[
        bool,
        "Resume although the recipe changed in what decides the course of a run: data, model, batch, horizon, seed.",
    ] = False
    export_at_end: Annotated[bool, "Leave a Hugging Face folder under export/ when the training is done."] = True
    export_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        "The dtype of the exported weights; null: that of the base checkpoint.",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole recipe. `path` is the file it came from; `places` has each key that it or the command line set, with its place."""

    path: str
    places: Mapping[str, str] = field(default_factory=dict)
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    lora: Lora = field(default_factory=Lora)
    quantization: Quantization = field(default_factory=Quantization)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optimization: Optimization = field(default_factory=Optimization)
    run: Run = field(default_factory=Run)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def place_of(self, key: str) -> str:
        """Where `key` was set, for messages: a line of the file, the command line, or the file itself."""
        return self.places.get(key, self.path)

    @property
    def method_facts(self) -> MethodFacts:
        """What data, training and plan must know of the recipe's method."""
        return METHODS[self.method.method]

    @property
    def teacher(self) -> Model | None:
        """The teacher as a model to load; None where the method has none."""
        name = self.method.teacher_model_name_or_path
        if self.method.method != "distill" or name is None:
            return None
        revision, own = self.method.teacher_model_revision, self.model
        return Model(
            model_name_or_path=name,
            model_revision=revision,
            trust_remote_code=own.trust_remote_code,
            dtype="float32" if self.lora.use_peft else own.dtype,
            attn_implementation=own.attn_implementation,
            torch_compile=own.torch_compile,
            tf32=own.tf32,
        )

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: max_length for each document of a group, so that any pair fits."""
        return self.data.max_length * self.method_facts.documents


SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]
    for f in fields(Recipe)
    if f.name not in ("path", "places")
}
