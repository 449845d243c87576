"""The recipe: the type, default and help text of each key.

A recipe file is flat. The classes below, its sections, group the keys by the package that reads
them: `recipe.optimization.learning_rate` is the file's `learning_rate`. The string in a key's
annotation is its help text, from which docs/recipes.md and `--help` are made.

Imports no torch, so that checking a recipe is fast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.export_formats import ExportFormatName
from finetune.config.keys import (
    NO_IN_YAML,
    FileName,
    FileOrName,
    Key,
    LocalFolder,
    MayChange,
    ModulePatterns,
    Positive,
    PythonName,
    ReadAs,
    StepsOrShare,
    keys_of,
)
from finetune.config.methods import (
    METHODS,
    MULTI_LABEL,
    ROWS,
    SINGLE_LABEL,
    STEP_SCORES,
    MethodFacts,
    RolloutKeys,
    ScoreHead,
)
from finetune.config.methods import Method as Method
from finetune.config.optimization import Optimization as Optimization
from finetune.config.quantization import Quantization as Quantization
from finetune.config.quantization import QuantizationAware as QuantizationAware
from finetune.config.quantization import SchemeName, quantize_to
from finetune.constants import ALL_LINEAR, HEADS, count_steps


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """All facts about a data format."""

    says: str  # what its rows are: a comment in recipes that `finetune init` writes
    is_chat: bool = False  # whether a chat template renders its rows
    # sets of columns; a row with all columns of one set is recognized as this format
    columns: tuple[tuple[str, ...], ...] = ()
    note: str = ""  # on the columns of the first set, for the list of known formats
    may_be_rated: bool = False  # whether a row may have further columns that rate its answer

    def fits(self, present: set[str]) -> bool:
        """Whether a row with values in the columns `present` is recognized as this format."""
        return any(present.issuperset(columns) for columns in self.columns)


TURNS = "conversations; the model's chat template writes their turns"
FORMATS: Mapping[str, FormatFacts] = {
    # The order counts: a row has the first format that fits.
    "messages": FormatFacts(
        TURNS,
        is_chat=True,
        columns=(("messages",),),
        note="a list of {role, content}",
        may_be_rated=True,
    ),
    "sharegpt": FormatFacts(
        TURNS,
        is_chat=True,
        columns=(("conversations",), ("conversation",)),
        note="a list of {from, value}",
        may_be_rated=True,
    ),
    "alpaca": FormatFacts(
        "instructions with their outputs, as turns of the model's chat template",
        is_chat=True,
        columns=(("instruction", "output"),),
        note="input too",
        may_be_rated=True,
    ),
    "prompt_completion": FormatFacts(
        "prompts with their completions, joined without a chat template",
        columns=(("prompt", "completion"), ("prompt", "chosen")),
        may_be_rated=True,
    ),
    "text": FormatFacts("plain text, all of it trained on", columns=(("text",),)),
    "tokens": FormatFacts("rows that are tokens already", columns=(("input_ids",),)),
    "squad": FormatFacts(
        "SQuAD's questions, with the first answer of each",
        columns=(("context", "question", "answers"),),
    ),
    "hellaswag": FormatFacts(
        "HellaSwag's contexts, with the right ending of each",
        columns=(("ctx", "endings", "label"),),
    ),
    "cauldron": FormatFacts(
        "questions about images, as The Cauldron has them",
        is_chat=True,
        columns=(("images", "texts"),),
        note="texts: a list of {user, assistant}",
    ),
}
# Names of formats in reports: those above, and names that the key `type` does not accept. See
# `ParsedRow.rendering`.
RENDERINGS: Mapping[str, FormatFacts] = {
    **FORMATS,
    "preference": FormatFacts(
        "pairs of a chosen and a rejected answer, as turns of the model's chat template",
        is_chat=True,
    ),
    "preference_text": FormatFacts(
        "pairs of a chosen and a rejected answer, joined without a chat template"
    ),
    "retrieval": FormatFacts("queries with the documents that answer them, each a text of its own"),
    "ranked": FormatFacts("queries with documents, each pair one text"),
    "steps": FormatFacts("prompts with the steps of an answer, each right or wrong"),
    "prompt_completion_messages": FormatFacts(
        "prompts with their answers, as turns of the model's chat template", is_chat=True
    ),
}

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]


# Each key below has a type, marks and a help text in `Annotated`, and then a default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters instead of full fine-tuning."""

    use_peft: Annotated[
        bool, "Train LoRA adapters on a frozen bf16 base instead of all parameters."
    ] = False
    adapter_name_or_path: Annotated[
        str | None,
        FileOrName,
        "A LoRA adapter to train further: a PEFT folder, a run or a hub name. Rank, alpha, "
        "targets and the rest are taken from its adapter_config.json; what the recipe sets as "
        "well must agree.",
    ] = None
    lora_r: Annotated[Positive, "The rank of the adapters."] = 16
    lora_alpha: Annotated[Positive, "The adapters are scaled by lora_alpha / lora_r."] = 32
    lora_dropout: Annotated[float, Ge(0), Lt(1), "Dropout on the adapters' input."] = 0.0
    lora_target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...],
        "The linear layers that get adapters, by the end of their names. all-linear: all but the "
        "output head; [all-linear, lm_head]: that too.",
    ] = "all-linear"
    lora_target_parameters: Annotated[
        tuple[str, ...],
        "Parameters that get adapters, by the end of their names: those that hold all experts of "
        "a mixture's layer (experts.gate_up_proj, experts.down_proj). Not under FSDP1.",
    ] = ()
    rank_pattern: Annotated[
        dict[str, Positive] | None,
        ModulePatterns,
        "The rank of some adapters in place of lora_r, by patterns for the end of their modules' "
        "names: {q_proj: 32, layers.0.mlp.*_proj: 4}.",
    ] = None
    alpha_pattern: Annotated[
        dict[str, Positive] | None, ModulePatterns, "The same for lora_alpha."
    ] = None
    modules_to_save: Annotated[
        tuple[str, ...],
        ModulePatterns,
        "Modules of the base that are trained whole, in float32, beside the adapters, by patterns "
        "for the end of their names: embed_tokens, lm_head.",
    ] = ()
    use_rslora: Annotated[bool, "Scale by lora_alpha / sqrt(lora_r) (rank-stabilized LoRA)."] = (
        False
    )
    use_dora: Annotated[bool, "Train magnitude and direction separately (DoRA)."] = False
    oft_block_size: Annotated[
        int | None,
        Gt(1),
        "Rotate the inputs of the adapted layers in blocks of this many numbers, instead of adding "
        "products of low rank (OFT, as peft trains it).",
    ] = None
    adapters: Annotated[
        tuple[dict[str, Any], ...],
        MayChange,
        "Several adapters that one run trains in turn on one base in memory, each as in a run "
        "alone, in a folder of its name: a list of {name: sql, datasets: ..., learning_rate: ...}, "
        "with the keys of data, adapter and optimization in which they differ.",
    ] = ()

    @property
    def adapts_all(self) -> bool:
        """Whether lora_target_modules includes all-linear."""
        return ALL_LINEAR in self.lora_target_modules

    @property
    def named_targets(self) -> tuple[str, ...]:
        """The names in lora_target_modules other than all-linear."""
        if isinstance(self.lora_target_modules, str):
            return ()
        return tuple(name for name in self.lora_target_modules if name != ALL_LINEAR)

    @property
    def adapts_head(self) -> bool:
        """Whether lora_target_modules names an output head, and modules_to_save does not."""
        heads = (name for name in self.named_targets if name.rpartition(".")[2] in HEADS)
        return any(name not in self.modules_to_save for name in heads)

    @property
    def is_fused(self) -> bool:
        """Whether the run trains only adapters that are fused with their layers.

        models/fused_lora.py computes such an adapter and its layer in one operation.
        """
        unfused = (
            self.lora_dropout
            or self.use_dora
            or self.modules_to_save
            or self.lora_target_parameters
            or self.oft_block_size
            or self.adapts_head
        )
        return self.use_peft and not unfused


PipelineSchedule = Literal["1f1b", "interleaved_1f1b"]
Turns = Literal["auto", "split", "whole", "last"]
Pooling = Literal["lasttoken", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """One entry of `datasets` or `eval_datasets`."""

    path: Annotated[
        str, FileOrName, "A file, glob, folder or hub name; must be given, or function."
    ] = ""
    function: Annotated[
        str | None,
        PythonName,
        "A function in a file of yours that yields the rows, such as my_data.py:rows. It must "
        "yield the same rows at each call: they are read again to be counted, and their tokens are "
        "kept until the file changes.",
    ] = None
    name: Annotated[str | None, "The hub data set's configuration."] = None
    split: Annotated[str, "Which split, slices such as train[:5%] included."] = "train"
    type: Annotated[FormatName | None, "The rows' format; null: recognized from the columns."] = (
        None
    )
    weight: Annotated[
        float,
        Gt(0),
        Le(100_000),
        (
            "How often the rows of this source are read in an epoch: 0.5 reads half of them, 2 "
            "reads each twice."
        ),
    ] = 1.0
    max_samples: Annotated[
        Positive | None,
        "Read this many of the rows, drawn by the seed; null: all. Of a stream the first rows are "
        "read, since a draw would need all of them.",
    ] = None
    messages_column: Annotated[
        str | None, "The column that holds the messages, if it has an unusual name."
    ] = None
    prompt_column: Annotated[str | None, "The column that holds the prompt or question."] = None
    completion_column: Annotated[str | None, "The column that holds the completion or answer."] = (
        None
    )
    text_column: Annotated[str | None, "The column that holds plain text."] = None
    chosen_column: Annotated[
        str | None,
        "The column that holds the better answer of a pair, or the conversation that ends in it; "
        "for retrieval, the document that answers the query in prompt_column.",
    ] = None
    rejected_column: Annotated[
        str | None,
        "The column that holds the worse answer of a pair; for retrieval, the negatives.",
    ] = None
    label_column: Annotated[
        str | None,
        (
            "The column that rates an answer (true for a good one, false for a bad one), or that "
            "names the class of a row."
        ),
    ] = None
    image_folder: Annotated[
        str | None,
        FileName,
        LocalFolder,
        "The folder from which paths of images start; null: that of the file that names them.",
    ] = None
    alpaca_prompt: Annotated[
        bool,
        "Write the question of an alpaca row in the wording of Alpaca's authors (Below is an "
        "instruction ...), inside the user's turn; chat_template: alpaca writes that wording "
        "without turns.",
    ] = False
    answers_apart: Annotated[
        bool,
        "Encode prompt and answer as two texts, as Axolotl does for type alpaca. It matters where "
        "a tokenizer puts a space before every text (SentencePiece): the answer then begins with "
        "one. The prompt begins with what the tokenizer writes before every text: no other BOS.",
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        "What the chat template reads beside the messages, such as {enable_thinking: false}. A "
        "row's own chat_template_kwargs prevail over these.",
    ] = None

    @property
    def origin(self) -> str:
        """The function that yields the rows, else the path that they are read from."""
        return self.function or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The keys about data, from files to rows of tokens."""

    datasets: Annotated[tuple[DatasetSource, ...], "What is trained on."] = ()
    eval_datasets: Annotated[
        tuple[DatasetSource, ...], MayChange, "What the held-out loss is measured on."
    ] = ()
    eval_split_size: Annotated[
        float | None,
        Gt(0),
        (
            "Rows to hold out from datasets if there are no eval_datasets: a share below 1, else a "
            "number of rows."
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        FileOrName,
        "null: the tokenizer's own; or the name of a model family's, such as chatml, llama3.1, "
        "mistral-v3, qwen3 or alpaca (all are in docs/chat-templates.md), a file, or inline Jinja.",
    ] = None
    chat_template_date: Annotated[
        str | None,
        "The date, such as 2026-01-31, that a chat template writes as today's (those of Llama 3.2, "
        "SmolLM3 and Granite do); null: the day on which the run begins, for all of its ranks and "
        "restarts.",
    ] = None
    max_length: Annotated[
        int,
        Gt(1),
        Le(1_000_000_000),
        (
            "Tokens in a row, and the most tokens in an example. Of a pair, the most in each of "
            "the two; a row then holds twice as many."
        ),
    ] = 2048
    packing: Annotated[bool, "Fill rows with several examples, isolated from each other."] = True
    overlength: Annotated[
        Literal["truncate", "drop", "split", "error"] | None,
        "What is done with an example of more than max_length tokens; always reported. null: "
        "plain text is split and anything else truncated.",
    ] = None
    assistant_only_loss: Annotated[
        bool, "In conversations, train only on the assistant's turns."
    ] = True
    turns: Annotated[
        Turns,
        "How the turns of a conversation become documents. whole: one document, as the chat "
        "template writes the conversation. split: a document for each of the assistant's turns, "
        "with the prompt that the model has when it is asked for that turn. auto: whole where each "
        "turn has that prompt anyway, else as few documents as give it. last: the last turn alone.",
    ] = "auto"
    train_on_reasoning: Annotated[
        bool,
        (
            "Train on the text of the reasoning in answers too; false: only on the tags around it "
            "and on the rest."
        ),
    ] = True
    on_bad_row: Annotated[
        Literal["error", "skip"],
        "What is done with a row that fits no known format; skips are counted.",
    ] = "error"
    labels: Annotated[
        tuple[str, ...],
        "The names of the classes, in the order of their scores. A row has one of the names in "
        "label_column, or the index of one in this list, from 0.",
    ] = ()
    problem_type: Annotated[
        Literal["single_label_classification", "multi_label_classification"],
        "Whether a row has one of labels, or a list of them, each decided independently; named as "
        "in transformers.",
    ] = SINGLE_LABEL
    step_separator: Annotated[
        str,
        "The text after each step of an answer; a step is scored at the last token of that text.",
    ] = "\n"
    pooling: Annotated[
        Pooling,
        "Which of a document's last hidden states is its embedding: that of its last token, or the "
        "mean of all; named as in sentence-transformers.",
    ] = "lasttoken"
    query_prompt: Annotated[
        str,
        (
            "The text before each query, such as an instruction; an export saves it for "
            "sentence-transformers."
        ),
    ] = ""
    document_prompt: Annotated[str, "The text before each document that is embedded or ranked."] = (
        ""
    )
    num_negatives: Annotated[
        int,
        Ge(0),
        "How many further documents are read for each query; with method: embed, documents that do "
        "not answer it. Each row needs as many; of more, the first are read.",
    ] = 0
    streaming: Annotated[
        bool, "Read the data while training instead of before; needs max_steps."
    ] = False
    dataset_num_proc: Annotated[
        Positive | None, MayChange, "Threads that tokenize; null: one for each core."
    ] = None
    dataset_cache_dir: Annotated[
        FileName | None,
        LocalFolder,
        MayChange,
        "Where tokenized rows are kept; null: in the Hugging Face cache.",
    ] = None
    dataloader_num_workers: Annotated[
        int,
        Ge(0),
        MayChange,
        "Threads that build batches ahead of the step; 0 builds them in the loop.",
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The keys about the model: where it comes from, which parts train, how it is computed."""

    model_name_or_path: Annotated[
        str | None, FileOrName, "A hub name or a local folder with config.json and safetensors."
    ] = None
    model_config: Annotated[
        dict[str, Any] | None,
        (
            "An architecture to train from random weights, with the keys of config.json; "
            "model_type is required."
        ),
    ] = None
    model_revision: Annotated[str | None, "The hub revision of model_name_or_path."] = None
    drop_vision: Annotated[
        bool,
        "Train only the language model of a vision-language checkpoint, in the family's text "
        "class. The export has that class too, and takes no images.",
    ] = False
    train_mtp: Annotated[
        bool,
        "Train the layers for multi-token prediction too; no model class of transformers has "
        "them, so it is refused. An export carries over those of the base.",
    ] = False
    tokenizer_name_or_path: Annotated[
        str | None, FileOrName, "The tokenizer; null: the model's own."
    ] = None
    added_tokens: Annotated[
        tuple[str, ...],
        "Tokens added to the tokenizer, such as [TOOL]. Their rows in embedding and head start at "
        "the mean of the others and are trained; LoRA then trains both whole, as if "
        "modules_to_save named them.",
    ] = ()
    special_tokens: Annotated[
        dict[Literal["bos_token", "eos_token", "pad_token", "unk_token"], str] | None,
        "The bos_token, eos_token, pad_token or unk_token to use in place of the tokenizer's own; "
        "a token that it lacks is added; under LoRA added_tokens must name it too.",
    ] = None
    eot_tokens: Annotated[
        tuple[str, ...],
        "Special tokens that end a turn, beside the eos_token; generation with the exported model "
        "stops at them.",
    ] = ()
    pad_vocab_to_multiple_of: Annotated[
        Positive,
        "If there are more tokens than rows in the embedding, it and the head get a multiple of "
        "this many rows.",
    ] = 64
    trust_remote_code: Annotated[
        bool, MayChange, "Run code from the model's or tokenizer's repository."
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        "The type of the trained parameters in memory, in every layout; LoRA's adapters are always "
        "float32. float32 keeps small updates; the compute dtype is the Accelerate config's.",
    ] = "float32"
    trainable_modules: Annotated[
        tuple[str, ...],
        ModulePatterns,
        "Train these modules alone and freeze the rest, by patterns for the end of their names: "
        "lm_head, layers.[0-3].mlp, self_attn.*_proj. Empty: all. For full fine-tuning; under "
        "LoRA see modules_to_save.",
    ] = ()
    frozen_modules: Annotated[
        tuple[str, ...],
        ModulePatterns,
        "Freeze these modules, even if trainable_modules names them too; patterns as there. Tied "
        "weights are one tensor.",
    ] = ()
    attn_implementation: Annotated[
        Literal[
            "auto",
            "sdpa",
            "eager",
            "flex_attention",
            "flash_attention_2",
            "flash_attention_3",
            "flash_attention_4",
        ],
        MayChange,
        "auto: varlen attention on CUDA, or torch's flex_attention where a model caps its scores, "
        "has sinks or wide heads; causal SDPA per document on CPU; no flash-attn build is needed, "
        "and where FlashAttention 3 (Hopper) or 4 (Blackwell) is installed, its kernels are used. "
        "flash_attention_3 and _4 require them; _3 without its package takes the hub's kernels.",
    ] = "auto"
    torch_compile: Annotated[
        bool,
        MayChange,
        "Compile the decoder layers' insides and the loss: faster steps for a minute more of the "
        "first start, worth it on a GPU.",
    ] = False
    tf32: Annotated[
        bool,
        "On a GPU, multiply float32 matrices in TensorFloat-32: several times faster, with 10 "
        "bits of the mantissa. bf16 computation does not need it.",
    ] = False
    use_liger_kernel: Annotated[
        bool,
        MayChange,
        "Liger's fused norms, rotary embeddings and MLPs on CUDA; needs the liger-kernel package.",
    ] = False
    activation_checkpointing_every: Annotated[
        Positive,
        MayChange,
        (
            "Checkpoint every k-th decoder layer, if the Accelerate config turns activation "
            "checkpointing on."
        ),
    ] = 1
    activation_checkpointing_keeps: Annotated[
        Literal["nothing", "attention", "attention_and_projections"],
        MayChange,
        "What a checkpointed layer keeps beside its input, instead of computing it again: the "
        "output of attention, whose computation grows with the length of documents; with the "
        "products around it (query, key, value, output). More memory, less time.",
    ] = "nothing"
    activation_offload: Annotated[
        bool,
        MayChange,
        "Keep what checkpointed layers keep (their inputs, and what "
        "activation_checkpointing_keeps names) in host memory until the backward, copied beside "
        "the computation; on CUDA, where the Accelerate config turns activation checkpointing on. "
        "With torch_compile only the inputs, without activation_checkpointing_keeps.",
    ] = False
    attention_dropout: Annotated[
        float | None,
        Ge(0),
        Lt(1),
        "Overrides the model's own attention dropout. With dropout, attention runs document by "
        "document on CUDA too, and scores that are capped, or have sinks, are materialized.",
    ] = None
    router_aux_loss_coef: Annotated[
        float | None,
        Ge(0),
        "The weight of a mixture's auxiliary loss; null leaves it to the model's config.",
    ] = None
    expert_parallel_size: Annotated[
        Positive,
        MayChange,
        "Divide the experts of a mixture's layers over groups of this many ranks, which send them "
        "their tokens; under FSDP2, which shards everything else over all ranks as before. 1: "
        "every rank gathers all experts of a layer.",
    ] = 1
    pipeline_parallel_size: Annotated[
        Positive,
        MayChange,
        "Put the layers on this many groups of ranks, one after another, through which the "
        "micro-batches of a step pass; under FSDP2, which shards and replicates within each "
        "group. 1: every rank computes all layers.",
    ] = 1
    pipeline_schedule: Annotated[
        PipelineSchedule,
        MayChange,
        "The order of forwards and backwards: 1f1b, or interleaved_1f1b with two groups of layers "
        "on each rank, which wait less and send more.",
    ] = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The keys about the rows of an optimizer step and their micro-batches."""

    global_batch_size: Annotated[
        Positive | None,
        MayChange,
        "Rows in an optimizer step over all ranks; set it and every number of ranks gives the "
        "same losses. null: per_device_train_batch_size x gradient_accumulation_steps x ranks.",
    ] = None
    per_device_train_batch_size: Annotated[
        Positive, MayChange, "Rows in a micro-batch on one rank; sets the memory."
    ] = 1
    gradient_accumulation_steps: Annotated[
        Positive | None,
        MayChange,
        "Micro-batches in a step on one rank; null: as global_batch_size implies, else 1.",
    ] = None
    per_device_eval_batch_size: Annotated[
        Positive | None, MayChange, "null: per_device_train_batch_size."
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The keys about a run's folder, seed, evaluations, logs and trackers."""

    run_name: Annotated[
        FileName | None, MayChange, "The run's name; null: the recipe's file name."
    ] = None
    output_dir: Annotated[
        FileName | None, LocalFolder, MayChange, "The run's folder; null: runs/<run_name>."
    ] = None
    accelerate_config: Annotated[
        str | None, FileOrName, MayChange, "The Accelerate config, if the command names none."
    ] = None
    seed: Annotated[int, Ge(0), Lt(2**63), "The seed of weights, data order and dropout."] = 42
    deterministic: Annotated[
        bool,
        MayChange,
        "On a GPU, use only kernels that give the same bits each time, such as a deterministic "
        "backward of attention: a resumed run is then bit for bit the run that was not stopped. "
        "Slower; a CPU needs no such key.",
    ] = False
    logging_steps: Annotated[
        StepsOrShare, MayChange, "Steps between two lines of metrics; below 1 a share of the run."
    ] = 10
    eval_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NO_IN_YAML,
        MayChange,
        "When the held-out loss is measured between the start and the end: every eval_steps, "
        "after every epoch, or not at all.",
    ] = "steps"
    eval_steps: Annotated[
        StepsOrShare | None,
        MayChange,
        (
            "Steps between two held-out losses; below 1 a share of the run; null: only at the "
            "start and the end."
        ),
    ] = None
    exact_match_samples: Annotated[
        int,
        Ge(0),
        MayChange,
        (
            "How many held-out prompts the model answers greedily before and after training; the "
            "answers are compared with the expected ones."
        ),
    ] = 0
    metrics: Annotated[
        tuple[str, ...],
        PythonName,
        MayChange,
        "Functions in files of yours, such as my_eval.py:score, beside the exact match. Each gets "
        "the prompt, the model's answer and the expected one, and returns a number; the mean is "
        "logged as metrics/score.",
    ] = ()
    sample_prompts: Annotated[
        tuple[str, ...],
        MayChange,
        (
            "Prompts that the model answers greedily at every evaluation, for you to read; each is "
            "a user's turn."
        ),
    ] = ()
    early_stopping_patience: Annotated[
        Positive | None,
        MayChange,
        "Stop after this many held-out losses in a row without a new minimum; needs eval_steps, or "
        "eval_strategy: epoch.",
    ] = None
    timeout_seconds: Annotated[
        float,
        Gt(0),
        Le(1e9),
        MayChange,
        "How long a rank waits for the others before the run is ended.",
    ] = 1800.0
    profile_steps: Annotated[
        tuple[Positive, Positive] | None,
        MayChange,
        "First and last step to profile, 1-based, such as [11, 13]: a Chrome trace and a snapshot "
        "of GPU memory in profile/.",
    ] = None
    callbacks: Annotated[
        tuple[str, ...],
        PythonName,
        MayChange,
        "Classes in files of yours, such as my_callbacks.py:Notify, whose on_start, on_step, "
        "on_log, on_evaluate, on_save and on_end are called: docs/api.md.",
    ] = ()
    report_to: Annotated[
        Literal["none", "all", "tensorboard", "wandb", "mlflow", "trackio"]
        | tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...],
        MayChange,
        (
            "A tracker in addition to metrics.jsonl, or a list of them; all: every one that is "
            "installed."
        ),
    ] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The keys about checkpoints and exports."""

    save_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NO_IN_YAML,
        MayChange,
        (
            "When checkpoints are saved before the end: every save_steps, after every epoch, or "
            "not at all."
        ),
    ] = "steps"
    save_steps: Annotated[
        StepsOrShare | None,
        MayChange,
        "Steps between two checkpoints; below 1 a share of the run; null: only at the end.",
    ] = None
    save_total_limit: Annotated[
        Positive | None, MayChange, "Keep the N newest checkpoints; null: all."
    ] = 2
    keep_every_steps: Annotated[
        Positive | None,
        MayChange,
        "Also keep, permanently, every checkpoint whose step is a multiple of this.",
    ] = None
    keep_best_checkpoint: Annotated[
        bool,
        MayChange,
        "Save at every new minimum of the held-out loss (see eval_steps), keep the newest of "
        "those as well, and export it.",
    ] = False
    async_save: Annotated[
        bool | None,
        MayChange,
        "Write checkpoints in the background, from a copy in host memory; null: on a GPU.",
    ] = None
    resume_from_checkpoint: Annotated[
        FileName,
        ReadAs(True, "auto"),
        LocalFolder,
        MayChange,
        (
            "auto: the newest checkpoint of output_dir that verifies; none: start over; or a "
            "checkpoint's path."
        ),
    ] = "auto"
    allow_changed_recipe: Annotated[
        bool,
        MayChange,
        (
            "Resume even if keys changed that decide the course of a run: data, model, batch, "
            "horizon, seed."
        ),
    ] = False
    export_at_end: Annotated[
        bool, MayChange, "Leave a Hugging Face folder under export/ when the training is done."
    ] = True
    export_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        MayChange,
        "The dtype of the exported weights; null: that of the base checkpoint.",
    ] = None
    export_formats: Annotated[
        tuple[ExportFormatName, ...],
        MayChange,
        "What is written to export/ when the training is done: safetensors, and beside it a GGUF "
        "file or a quantized folder, as finetune export --format writes them.",
    ] = ("safetensors",)
    export_quantization: Annotated[
        SchemeName | None,
        MayChange,
        "The scheme of export_formats: compressed-tensors, such as fp8-fp8 or int8-int8; null: "
        "that of quantization_aware_training.",
    ] = None

    def count_kept(self, steps: int | None) -> int | None:
        """Returns the most checkpoints that a run of `steps` steps keeps; None if it keeps all.

        If the number of steps is None, those that `keep_every_steps` keeps are not counted.
        """
        if self.save_total_limit is None:
            return None
        kept = self.save_total_limit + self.keep_best_checkpoint
        if self.keep_every_steps is not None and steps is not None:
            kept_interval = self.keep_every_steps
            save_interval = count_steps(self.save_steps, steps)
            # a best checkpoint may be saved, and kept, at other multiples of keep_every_steps too
            if save_interval is not None and not self.keep_best_checkpoint:
                kept_interval = math.lcm(kept_interval, save_interval)
            kept += (steps - 1) // kept_interval  # that of the last step is in the limit
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole recipe."""

    path: str  # its file; of a recipe without a file, where its keys were given
    # key that was set -> FILE:LINE, or the command line
    places: Mapping[str, str] = field(default_factory=dict)
    # a sentence for each module name that was replaced by transformers' name (module_names.py)
    renamed: tuple[str, ...] = ()
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    rollout: RolloutKeys = field(default_factory=RolloutKeys)
    lora: Lora = field(default_factory=Lora)
    quantization: Quantization = field(default_factory=Quantization)
    quantization_aware: QuantizationAware = field(default_factory=QuantizationAware)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optimization: Optimization = field(default_factory=Optimization)
    run: Run = field(default_factory=Run)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def name(self) -> str:
        """The run's name, for folders and trackers: `run_name`, else the recipe's file name."""
        return self.run.run_name or Path(self.path).stem

    @property
    def folder(self) -> Path:
        """The run's folder: `output_dir`, else runs/<name>."""
        return Path(self.run.output_dir or Path("runs") / self.name)

    def saves_async(self, device: str) -> bool:
        """Whether checkpoints are written in the background; `device`: cuda or cpu.

        The default is true on a GPU. Optimizer state that is in files already would need twice its
        memory on the host for that, so the default is false with it.
        """
        if self.checkpoint.async_save is not None:
            return self.checkpoint.async_save
        return device == "cuda" and self.optimization.optim_offload == "none"

    def list_saves(self, steps: int, steps_per_epoch: int | None) -> set[int]:
        """Lists the steps after which a run of `steps` steps may save without a signal.

        With `keep_best_checkpoint`, every held-out loss may be a new minimum, which is saved.
        `steps_per_epoch` None: that number is not known, and ends of epochs are not listed.
        """

        def list_steps(strategy: str, interval: float | None) -> range:
            if strategy == "epoch":
                interval_steps = steps_per_epoch
            else:
                interval_steps = count_steps(interval, steps)
            return range(interval_steps, steps, interval_steps) if interval_steps else range(0)

        saves = {steps, *list_steps(self.checkpoint.save_strategy, self.checkpoint.save_steps)}
        if self.checkpoint.keep_best_checkpoint:
            saves.update(list_steps(self.run.eval_strategy, self.run.eval_steps))
        return saves

    @property
    def alone(self) -> "Recipe":
        """The recipe without `adapters`: of one adapter, as if it were trained in a run alone."""
        return replace(self, lora=replace(self.lora, adapters=()))

    def place_of(self, key: str) -> str:
        """Returns where `key` was set, for messages: FILE:LINE or the command line.

        Returns the file if the key has its default.
        """
        return self.places.get(key, self.path)

    @property
    def method_facts(self) -> MethodFacts:
        """The facts about the recipe's method."""
        return METHODS[self.method.method]

    @property
    def has_reference(self) -> bool:
        """Whether a method that samples completions penalizes distance from a reference model.

        The reference is the model before training.
        """
        facts = self.method_facts
        return facts.samples and not facts.needs_teacher and self.method.beta > 0

    @property
    def measures_generations(self) -> bool:
        """Whether completions are measured before the generation's first update.

        Without a critic, the loss needs that only if it corrects for the sampler and makes several
        updates on the same completions.
        """
        facts = self.method_facts
        if not facts.samples:
            return False
        needs_old = self.rollout.corrects_sampling and self.rollout.updates_per_generation > 1
        return facts.has_critic or needs_old

    @property
    def generation_forwards(self) -> float:
        """How often a token is measured before its generation's first update, by the trained model.

        It is a share of the times that the token is trained on. With a critic, the model with its
        adapters off measures it too, where it is the reference.
        """
        if not self.measures_generations:
            return 0.0
        measures_reference = self.has_critic_reference and self.teacher is None
        return (1 + measures_reference) / self.rollout.num_iterations

    @property
    def teacher_passes(self) -> float:
        """How often `teacher` computes a token for each time that it is trained on.

        With a critic it is the reference of a generation; the passes after the first need it no
        more.
        """
        return 1 / self.rollout.num_iterations if self.has_critic_reference else 1.0

    @property
    def has_critic_reference(self) -> bool:
        """Whether the reference is a part of a critic's rewards, and not of the loss."""
        return self.has_reference and self.method_facts.has_critic

    @property
    def teacher(self) -> Model | None:
        """The frozen second model that the run loads; None if it loads none.

        It is the teacher, or the reference of a method that samples.
        """
        # else the model without its adapters is the reference, and no second model is loaded
        if self.has_reference and self.trains_base:
            dtype: Any = "float32" if self.lora.use_peft else self.model.dtype
            return replace(self.model, dtype=dtype, trainable_modules=(), frozen_modules=())
        name = self.method.teacher_model_name_or_path
        if not self.method_facts.needs_teacher or name is None:
            return None
        student = self.model
        return Model(
            model_name_or_path=name,
            model_revision=self.method.teacher_model_revision,
            trust_remote_code=student.trust_remote_code,
            dtype="float32" if self.lora.use_peft else student.dtype,
            attn_implementation=student.attn_implementation,
            torch_compile=student.torch_compile,
            tf32=student.tf32,
        )

    @property
    def teacher_key(self) -> str:
        """The key that asks for `teacher`."""
        return "teacher_model_name_or_path" if self.method_facts.needs_teacher else "beta"

    @property
    def teacher_quantization(self) -> Quantization:
        """How `teacher` is quantized in memory if its files are not; a reference is as the base."""
        if not self.method_facts.needs_teacher:
            return self.quantization
        if self.method.teacher_load_in_4bit:
            return quantize_to(4, double=True)
        return Quantization()

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the scores that the output head computes, in their order.

        Empty if the method trains no head of scores.
        """
        if not self.method_facts.scores:
            return ()
        if self.method_facts.rows == "classes":
            return self.data.labels
        if self.method_facts.rows == "steps":
            return STEP_SCORES
        return (self.method.method,)

    @property
    def score_head(self) -> ScoreHead:
        """What the output head computes: scores, or logits with or without a critic's values."""
        if self.method_facts.rows == "classes":
            return ScoreHead(self.score_names, self.data.problem_type)
        return ScoreHead(
            self.score_names,
            reads_tokens=self.method_facts.rows == "steps",
            has_values=self.method_facts.has_critic,
        )

    @property
    def labels_are_indices(self) -> bool:
        """Whether each label is the index of one of the head's outputs, such as a token or a class.

        The loss of an export can then be measured as a cross entropy.
        """
        if self.method_facts.masks:  # such a model predicts masked tokens, not the next ones
            return False
        facts = ROWS[self.method_facts.rows]
        has_several = self.data.problem_type == MULTI_LABEL
        is_class = facts.label in ("class", "steps") and not has_several
        return facts.head == "vocabulary" or (facts.head == "scores" and is_class)

    @property
    def samples_itself(self) -> bool:
        """Whether the model in training samples its completions, rather than a vLLM server."""
        return self.method_facts.samples and self.rollout.vllm_server_base_url is None

    @property
    def trains_base(self) -> bool:
        """Whether the model without its adapters differs from the model before training.

        Then it cannot be the reference. It differs if weights of the base are trained, or if the
        adapters were trained before.
        """
        lora = self.lora
        differs = lora.modules_to_save or lora.adapter_name_or_path or self.model.added_tokens
        return not lora.use_peft or bool(differs)

    @property
    def document_data(self) -> Data:
        """`data` with the limits of the documents that are read from it.

        If the method samples, a document is a prompt: max_length leaves room for the completion,
        and a longer prompt is dropped unless the recipe sets overlength.
        """
        if not self.method_facts.samples:
            return self.data
        prompt_length = self.data.max_length - self.rollout.max_completion_length
        overlength = self.data.overlength or "drop"
        return replace(self.data, max_length=prompt_length, overlength=overlength)

    @property
    def group_size(self) -> int:
        """Number of documents in a group, such as a pair; a batch holds whole groups."""
        return ROWS[self.method_facts.rows].count_documents(self.data.num_negatives)

    @property
    def row_tokens(self) -> int:
        """Number of tokens in a packed row: max_length for each document of a group."""
        return self.data.max_length * self.group_size


# Section of a `Recipe` -> the dataclass of its keys.
SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]
    for f in fields(Recipe)
    if f.name not in ("path", "places", "renamed")
}


# The sections and keys in which the entries of `adapters` may differ.
SECTIONS_OF_ADAPTERS = ("lora", "optimization")
KEYS_OF_ADAPTERS = ("datasets", "eval_datasets", "eval_split_size", "seed")


@cache
def adapter_keys() -> dict[str, Key]:
    """Returns the keys that an entry of `adapters` may have beside its name: name -> key."""
    return {
        name: key
        for name, key in recipe_keys().items()
        if (key.section in SECTIONS_OF_ADAPTERS and name not in ("use_peft", "adapters"))
        or name in KEYS_OF_ADAPTERS
    }


# Key whose value is a list of mappings -> the dataclass of a mapping.
NESTED: dict[str, type] = {"datasets": DatasetSource, "eval_datasets": DatasetSource}


@cache
def recipe_keys() -> dict[str, Key]:
    """Returns all keys at the top of a recipe file: name -> key."""
    return {
        name: key
        for section, schema in SECTIONS.items()
        for name, key in keys_of(schema, section).items()
    }


def compute_global_batch_size(batch: Batch, world_size: int) -> int:
    """Returns the number of rows in an optimizer step over all ranks.

    `world_size`: the number of ranks, or of groups of ranks, that train on different rows.
    """
    if batch.global_batch_size is not None:
        return batch.global_batch_size
    return batch.per_device_train_batch_size * (batch.gradient_accumulation_steps or 1) * world_size
