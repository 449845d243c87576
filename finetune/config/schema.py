"""The recipe: every key, its type, its default and its help, once.

No torch here, so that a check answers at once.

A recipe file is flat; the classes below only say which package reads which key. `Recipe` gathers
them: `recipe.optimization.learning_rate` is the file's `learning_rate`. The string in each
annotation is the key's help, the documentation page and `--help` are made from it.
"""

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
    ModulePatterns,
    Positive,
    PythonName,
    ReadAs,
    SameOnResume,
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
from finetune.config.quantization import SchemeName
from finetune.constants import ALL_LINEAR, HEADS


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """The facts about a data format that the rest of the package needs."""

    says: str  # what its rows are, in a recipe that `finetune init` writes
    is_chat: bool = False  # a chat template renders its rows
    columns: tuple[tuple[str, ...], ...] = ()  # by all of any of these a row of it is recognized
    note: str = ""  # on the first of these, where the known formats are listed
    may_be_rated: bool = False  # whether other columns may say how good its answer is

    def fits(self, present: set[str]) -> bool:
        """Whether a row with these columns is recognized as one of the format."""
        return any(present.issuperset(columns) for columns in self.columns)


TURNS = "conversations; the model's chat template writes their turns"
FORMATS: Mapping[str, FormatFacts] = {
    # The first that fits is a row's.
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
# These and the names in reports that `type` does not take: see `ParsedRow.rendering`.
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


# A key: its type and marks, then its help and default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters instead of full fine-tuning."""

    use_peft: Annotated[
        bool, SameOnResume, "Train LoRA adapters on a frozen bf16 base instead of all parameters."
    ] = False
    adapter_name_or_path: Annotated[
        str | None,
        FileOrName,
        SameOnResume,
        "A LoRA adapter to train further: a PEFT folder, a run or a hub name. Rank, alpha, "
        "targets and the rest are taken from its adapter_config.json; what the recipe sets as "
        "well must agree.",
    ] = None
    lora_r: Annotated[Positive, SameOnResume, "The rank of the adapters."] = 16
    lora_alpha: Annotated[
        Positive, SameOnResume, "The adapters are scaled by lora_alpha / lora_r."
    ] = 32
    lora_dropout: Annotated[
        float, Ge(0), Lt(1), SameOnResume, "Dropout on the adapters' input."
    ] = 0.0
    lora_target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...],
        SameOnResume,
        "The linear layers that get adapters, by the end of their names. all-linear: all but the "
        "output head; [all-linear, lm_head]: that too.",
    ] = "all-linear"
    lora_target_parameters: Annotated[
        tuple[str, ...],
        SameOnResume,
        "Parameters that get adapters, by the end of their names: those that hold all experts of "
        "a layer of a mixture (experts.gate_up_proj, experts.down_proj). Not under FSDP1.",
    ] = ()
    rank_pattern: Annotated[
        dict[str, Positive] | None,
        ModulePatterns,
        SameOnResume,
        "The rank of some adapters in place of lora_r, by patterns for the end of their modules' "
        "names: {q_proj: 32, layers.0.mlp.*_proj: 4}.",
    ] = None
    alpha_pattern: Annotated[
        dict[str, Positive] | None, ModulePatterns, SameOnResume, "The same for lora_alpha."
    ] = None
    modules_to_save: Annotated[
        tuple[str, ...],
        ModulePatterns,
        SameOnResume,
        "Modules of the base that are trained whole, in float32, beside the adapters, by patterns "
        "for the end of their names: embed_tokens, lm_head.",
    ] = ()
    use_rslora: Annotated[
        bool, SameOnResume, "Scale by lora_alpha / sqrt(lora_r) (rank-stabilized LoRA)."
    ] = False
    use_dora: Annotated[bool, SameOnResume, "Train magnitude and direction separately (DoRA)."] = (
        False
    )
    oft_block_size: Annotated[
        int | None,
        Gt(1),
        SameOnResume,
        "Rotate the inputs of the adapted layers in blocks of so many numbers, in place of adding "
        "products of low rank (OFT, as peft trains it).",
    ] = None
    adapters: Annotated[
        tuple[dict[str, Any], ...],
        "Several adapters that one run trains in turn on one base in memory, each as a run alone, "
        "in a folder of its name: a list of {name: sql, datasets: ..., learning_rate: ...}, with "
        "the keys of data, adapter and optimization in which they differ.",
    ] = ()

    @property
    def adapts_all(self) -> bool:
        """Whether all linear layers but the output head get adapters."""
        return ALL_LINEAR in self.lora_target_modules

    @property
    def named_targets(self) -> tuple[str, ...]:
        """The names in lora_target_modules."""
        if isinstance(self.lora_target_modules, str):
            return ()
        return tuple(name for name in self.lora_target_modules if name != ALL_LINEAR)

    @property
    def adapts_head(self) -> bool:
        """Whether lora_target_modules names an output head that is not trained whole."""
        heads = (name for name in self.named_targets if name.rpartition(".")[2] in HEADS)
        return any(name not in self.modules_to_save for name in heads)

    @property
    def is_fused(self) -> bool:
        """Whether every adapter is computed with its layer (models/fused_lora.py), and the rest is
        frozen.
        """
        others = (
            self.lora_dropout
            or self.use_dora
            or self.modules_to_save
            or self.lora_target_parameters
            or self.oft_block_size
            or self.adapts_head
        )
        return self.use_peft and not others


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
        "A function of a file of yours that yields the rows, such as my_data.py:rows. The same "
        "rows at each call: they are read again where they are counted, and their tokens are kept "
        "until the file changes.",
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
        "Read this many of the rows, drawn by the seed; null: all. Of a stream the first ones, "
        "since to draw them it would have to be read to its end.",
    ] = None
    messages_column: Annotated[
        str | None, "The column that holds the messages, where it is not named as usual."
    ] = None
    prompt_column: Annotated[str | None, "The column that holds the prompt or question."] = None
    completion_column: Annotated[str | None, "The column that holds the completion or answer."] = (
        None
    )
    text_column: Annotated[str | None, "The column that holds plain text."] = None
    chosen_column: Annotated[
        str | None,
        "The column that holds the better answer of a pair, or the conversation that ends in it; "
        "of retrieval the document that answers the query, which prompt_column names.",
    ] = None
    rejected_column: Annotated[
        str | None, "The column that holds the worse one, or the negatives."
    ] = None
    label_column: Annotated[
        str | None,
        (
            "The column that rates an answer: true for a good one, false for a bad one; or that "
            "names a row's class."
        ),
    ] = None
    image_folder: Annotated[
        str | None,
        FileName,
        "Where the paths of images begin; null: the folder of the file that names them.",
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
        "What the chat template reads beside the messages, as enable_thinking: false. A row's own "
        "chat_template_kwargs come before these.",
    ] = None

    @property
    def origin(self) -> str:
        """Where the rows come from: the path, or the function."""
        return self.function or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """From files to rows of tokens."""

    datasets: Annotated[tuple[DatasetSource, ...], SameOnResume, "What is trained on."] = ()
    eval_datasets: Annotated[
        tuple[DatasetSource, ...], "What the held-out loss is measured on."
    ] = ()
    eval_split_size: Annotated[
        float | None,
        Gt(0),
        SameOnResume,
        (
            "Held out from datasets where no eval_datasets are named: a share below 1, else a "
            "count of rows."
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        FileOrName,
        SameOnResume,
        "null: the tokenizer's own; or the name of a model family's, such as chatml, llama3.1, "
        "mistral-v3, qwen3 or alpaca (all are in docs/chat-templates.md), a file, or inline Jinja.",
    ] = None
    chat_template_date: Annotated[
        str | None,
        SameOnResume,
        "The day, as 2026-01-31, that a chat template writes which asks for today's (Llama 3.2's, "
        "SmolLM3's, Granite's do); null: the day on which the run begins, for all of its ranks "
        "and restarts.",
    ] = None
    max_length: Annotated[
        int,
        Gt(1),
        Le(1_000_000_000),
        SameOnResume,
        (
            "Tokens in a row, and at most in an example; of a pair at most in each side, and a row "
            "holds twice as many."
        ),
    ] = 2048
    packing: Annotated[
        bool, SameOnResume, "Fill rows with several examples, isolated from each other."
    ] = True
    overlength: Annotated[
        Literal["truncate", "drop", "split", "error"] | None,
        SameOnResume,
        "What is done with an example of more than max_length tokens; always reported. null: "
        "plain text is split and anything else truncated.",
    ] = None
    assistant_only_loss: Annotated[
        bool, SameOnResume, "In conversations, train only on the assistant's turns."
    ] = True
    turns: Annotated[
        Turns,
        SameOnResume,
        "How the turns of a conversation become documents. whole: one document, as the chat "
        "template writes the conversation. split: a document for each of the assistant's turns, "
        "with the prompt that the model has when it is asked for that turn. auto: whole where each "
        "turn has that prompt anyway, else as few documents as give it. last: the last turn alone.",
    ] = "auto"
    train_on_reasoning: Annotated[
        bool,
        SameOnResume,
        (
            "Train on the words of the answers' reasoning too; false: on the tags around it and "
            "the rest."
        ),
    ] = True
    on_bad_row: Annotated[
        Literal["error", "skip"],
        SameOnResume,
        "What is done with a row that fits no known format; skips are counted.",
    ] = "error"
    labels: Annotated[
        tuple[str, ...],
        SameOnResume,
        "The names of the classes, in the order of their scores. A row has one of them in "
        "label_column, or its place in this list, from 0.",
    ] = ()
    problem_type: Annotated[
        Literal["single_label_classification", "multi_label_classification"],
        SameOnResume,
        "Whether a row has one of labels, or a list of them, of which each is decided alone; by "
        "transformers' names.",
    ] = SINGLE_LABEL
    step_separator: Annotated[
        str,
        SameOnResume,
        "What is written behind each step of an answer; a step is scored at its last token.",
    ] = "\n"
    pooling: Annotated[
        Pooling,
        SameOnResume,
        "What of a document's last hidden states is its embedding: that of its last token, or the "
        "mean of all, by sentence-transformers' names.",
    ] = "lasttoken"
    query_prompt: Annotated[
        str,
        SameOnResume,
        (
            "Before each query that is embedded or ranked by, such as an instruction; an export "
            "names it to sentence-transformers."
        ),
    ] = ""
    document_prompt: Annotated[
        str, SameOnResume, "Before each document that is embedded or ranked."
    ] = ""
    num_negatives: Annotated[
        int,
        Ge(0),
        SameOnResume,
        "How many documents beside one are read of each query: of embed, those that do not answer "
        "it. The first ones are read; each row needs as many.",
    ] = 0
    streaming: Annotated[
        bool, SameOnResume, "Read the data while training instead of before; needs max_steps."
    ] = False
    dataset_num_proc: Annotated[
        Positive | None, "Threads that tokenize; null: one for each core."
    ] = None
    dataset_cache_dir: Annotated[
        str | None, "Where tokenized rows are kept; null: in the Hugging Face cache."
    ] = None
    dataloader_num_workers: Annotated[
        int, Ge(0), "Threads that build batches ahead of the step; 0 builds them in the loop."
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model is trained, and from what."""

    model_name_or_path: Annotated[
        str | None,
        FileOrName,
        SameOnResume,
        "A hub name or a local folder with config.json and safetensors.",
    ] = None
    model_config: Annotated[
        dict[str, Any] | None,
        SameOnResume,
        (
            "An inline architecture to train from random weights, as in config.json; model_type is "
            "required."
        ),
    ] = None
    model_revision: Annotated[
        str | None, SameOnResume, "The hub revision of model_name_or_path."
    ] = None
    drop_vision: Annotated[
        bool,
        SameOnResume,
        "Of a vision-language checkpoint train the language model alone, as the family's text "
        "class: the export is that class's, and takes no images.",
    ] = False
    train_mtp: Annotated[
        bool,
        SameOnResume,
        "Train the layers for multi-token prediction too; no model class of transformers has "
        "them, so it is refused. An export carries over those of the base.",
    ] = False
    tokenizer_name_or_path: Annotated[
        str | None, FileOrName, SameOnResume, "The tokenizer; null: the model's own."
    ] = None
    added_tokens: Annotated[
        tuple[str, ...],
        SameOnResume,
        "Tokens added to the tokenizer, such as [TOOL]. Their rows in embedding and head start at "
        "the mean of the others and are trained; LoRA then trains both whole, as if "
        "modules_to_save named them.",
    ] = ()
    special_tokens: Annotated[
        dict[Literal["bos_token", "eos_token", "pad_token", "unk_token"], str] | None,
        SameOnResume,
        "The tokenizer's bos_token, eos_token, pad_token or unk_token, where others than its own "
        "are wanted; a token that it lacks is added.",
    ] = None
    eot_tokens: Annotated[
        tuple[str, ...],
        SameOnResume,
        "Tokens that end a turn, beside the eos_token: special ones, at which generation with the "
        "exported model stops.",
    ] = ()
    pad_vocab_to_multiple_of: Annotated[
        Positive,
        SameOnResume,
        "Where the tokens outgrow the embedding, it and the head get a multiple of this many rows.",
    ] = 64
    trust_remote_code: Annotated[bool, "Run code from the model's or tokenizer's repository."] = (
        False
    )
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        SameOnResume,
        "The type of the trained parameters in memory, in every layout; LoRA's adapters are always "
        "float32. float32 keeps small updates; the compute dtype is the Accelerate config's.",
    ] = "float32"
    trainable_modules: Annotated[
        tuple[str, ...],
        ModulePatterns,
        SameOnResume,
        "Train these modules alone and freeze the rest, by patterns for the end of their names: "
        "lm_head, layers.[0-3].mlp, self_attn.*_proj. Empty: all. For full fine-tuning; under "
        "LoRA see modules_to_save.",
    ] = ()
    frozen_modules: Annotated[
        tuple[str, ...],
        ModulePatterns,
        SameOnResume,
        "Freeze these modules, by patterns as in trainable_modules, over which they prevail; tied "
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
        "auto: varlen attention on CUDA, or torch's flex_attention where a model caps its scores, "
        "has sinks or wide heads; causal SDPA per document on CPU; no flash-attn build is needed, "
        "and where FlashAttention 3 (Hopper) or 4 (Blackwell) is installed, its kernels are used. "
        "flash_attention_3 and _4 require them; _3 without its package takes the hub's kernels.",
    ] = "auto"
    torch_compile: Annotated[
        bool,
        "Compile the decoder layers' insides and the loss: faster steps for a minute more of the "
        "first start, worth it on a GPU.",
    ] = False
    tf32: Annotated[
        bool,
        SameOnResume,
        "On a GPU, multiply float32 matrices in TensorFloat-32: several times faster, with 10 "
        "bits of the mantissa. bf16 computation does not need it.",
    ] = False
    use_liger_kernel: Annotated[
        bool,
        "Liger's fused norms, rotary embeddings and MLPs on CUDA; needs the liger-kernel package.",
    ] = False
    activation_checkpointing_every: Annotated[
        Positive,
        (
            "Checkpoint every k-th decoder layer, where the Accelerate config turns activation "
            "checkpointing on."
        ),
    ] = 1
    activation_checkpointing_keeps: Annotated[
        Literal["nothing", "attention", "attention_and_projections"],
        "What a checkpointed layer keeps beside its input, instead of computing it again: the "
        "output of attention, whose computation grows with the length of documents; with the "
        "products around it (query, key, value, output). More memory, less time.",
    ] = "nothing"
    activation_offload: Annotated[
        bool,
        "Keep what checkpointed layers keep (their inputs, and what "
        "activation_checkpointing_keeps names) in host memory until the backward, copied beside "
        "the computation; on CUDA, where the Accelerate config turns activation checkpointing on. "
        "With torch_compile only the inputs, without activation_checkpointing_keeps.",
    ] = False
    attention_dropout: Annotated[
        float | None,
        Ge(0),
        Lt(1),
        SameOnResume,
        "Overrides the model's own attention dropout. With dropout, attention runs document by "
        "document on CUDA too, and scores that are capped, or have sinks, are materialized.",
    ] = None
    router_aux_loss_coef: Annotated[
        float | None,
        Ge(0),
        SameOnResume,
        "The weight of a mixture's auxiliary loss; null leaves it to the model's config.",
    ] = None
    expert_parallel_size: Annotated[
        Positive,
        "Divide the experts of a mixture's layers over groups of this many ranks, which send them "
        "their tokens; under FSDP2, which shards everything else over all ranks as before. 1: "
        "every rank gathers all experts of a layer.",
    ] = 1
    pipeline_parallel_size: Annotated[
        Positive,
        "Put the layers on this many groups of ranks, one after another, through which the "
        "micro-batches of a step pass; under FSDP2, which shards and replicates within each "
        "group. 1: every rank computes all layers.",
    ] = 1
    pipeline_schedule: Annotated[
        PipelineSchedule,
        "The order of forwards and backwards: 1f1b, or interleaved_1f1b with two groups of layers "
        "on each rank, which wait less and send more.",
    ] = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many rows make a step, and how they are dealt out."""

    global_batch_size: Annotated[
        Positive | None,
        "Rows in an optimizer step over all ranks; set it and every number of ranks gives the "
        "same losses. null: per_device_train_batch_size x gradient_accumulation_steps x ranks.",
    ] = None
    per_device_train_batch_size: Annotated[
        Positive, "Rows in a micro-batch on one rank; sets the memory."
    ] = 1
    gradient_accumulation_steps: Annotated[
        Positive | None,
        "Micro-batches in a step on one rank; null: as global_batch_size implies, else 1.",
    ] = None
    per_device_eval_batch_size: Annotated[Positive | None, "null: per_device_train_batch_size."] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where it goes, how often it is looked at, how it is kept."""

    run_name: Annotated[FileName | None, "The run's name; null: the recipe's file name."] = None
    output_dir: Annotated[FileName | None, "The run's folder; null: runs/<run_name>."] = None
    accelerate_config: Annotated[
        str | None, FileOrName, "The Accelerate config where the command names none."
    ] = None
    seed: Annotated[
        int, Ge(0), Lt(2**63), SameOnResume, "Of the weights, the data order and dropout."
    ] = 42
    deterministic: Annotated[
        bool,
        "On a GPU, use only kernels that give the same bits each time, such as a deterministic "
        "backward of attention: a resumed run is then bit for bit the run that was not stopped. "
        "Slower; a CPU needs no such key.",
    ] = False
    logging_steps: Annotated[
        StepsOrShare, "Steps between two lines of metrics; below 1 a share of the run."
    ] = 10
    eval_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NO_IN_YAML,
        "When the held-out loss is measured between the start and the end: every eval_steps, "
        "after every epoch, or not at all.",
    ] = "steps"
    eval_steps: Annotated[
        StepsOrShare | None,
        (
            "Steps between two held-out losses; below 1 a share of the run; null: only at the "
            "start and the end."
        ),
    ] = None
    exact_match_samples: Annotated[
        int,
        Ge(0),
        (
            "The number of held-out prompts answered greedily before and after training and "
            "compared with the reference."
        ),
    ] = 0
    metrics: Annotated[
        tuple[str, ...],
        PythonName,
        "Functions of files of yours, such as my_eval.py:score, beside the exact match: each gets "
        "the prompt, the model's answer and the expected one, and returns a number, whose mean is "
        "logged as metrics/score.",
    ] = ()
    sample_prompts: Annotated[
        tuple[str, ...],
        (
            "Prompts that are answered greedily at every evaluation, to be read; each is a user's "
            "turn."
        ),
    ] = ()
    early_stopping_patience: Annotated[
        Positive | None,
        "Stop after this many held-out losses in a row without a new minimum; needs eval_steps, or "
        "eval_strategy: epoch.",
    ] = None
    timeout_seconds: Annotated[
        float, Gt(0), "How long a rank waits for the others before the run is ended."
    ] = 1800.0
    profile_steps: Annotated[
        tuple[Positive, Positive] | None,
        "First and last step to profile, 1-based, such as [11, 13]: a Chrome trace and a snapshot "
        "of GPU memory in profile/.",
    ] = None
    callbacks: Annotated[
        tuple[str, ...],
        PythonName,
        "Classes of files of yours, such as my_callbacks.py:Notify, whose on_start, on_step, "
        "on_log, on_evaluate, on_save and on_end are called: docs/api.md.",
    ] = ()
    report_to: Annotated[
        Literal["none", "all", "tensorboard", "wandb", "mlflow", "trackio"]
        | tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...],
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
        (
            "When checkpoints are saved before the end: every save_steps, after every epoch, or "
            "not at all."
        ),
    ] = "steps"
    save_steps: Annotated[
        StepsOrShare | None,
        "Steps between two checkpoints; below 1 a share of the run; null: only at the end.",
    ] = None
    save_total_limit: Annotated[Positive | None, "Keep the N newest checkpoints; null: all."] = 2
    keep_every_steps: Annotated[
        Positive | None,
        "Also keep, permanently, every checkpoint whose step is a multiple of this.",
    ] = None
    keep_best_checkpoint: Annotated[
        bool,
        "Save at every new minimum of the held-out loss (see eval_steps), keep the newest of "
        "those as well, and export it.",
    ] = False
    async_save: Annotated[
        bool | None,
        "Write checkpoints in the background, from a copy in host memory; null: on a GPU.",
    ] = None
    resume_from_checkpoint: Annotated[
        str,
        ReadAs(True, "auto"),
        (
            "auto: the newest checkpoint of output_dir that verifies; none: start over; or a "
            "checkpoint's path."
        ),
    ] = "auto"
    allow_changed_recipe: Annotated[
        bool,
        (
            "Resume although the recipe changed in what decides the course of a run: data, model, "
            "batch, horizon, seed."
        ),
    ] = False
    export_at_end: Annotated[
        bool, "Leave a Hugging Face folder under export/ when the training is done."
    ] = True
    export_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        "The dtype of the exported weights; null: that of the base checkpoint.",
    ] = None
    export_formats: Annotated[
        tuple[ExportFormatName, ...],
        "What is left under export/ when the training is done: safetensors, and beside it a GGUF "
        "file, or a folder that is quantized, as finetune export --format does.",
    ] = ("safetensors",)
    export_quantization: Annotated[
        SchemeName | None,
        "Of export_formats: compressed-tensors, a scheme such as fp8-fp8 or int8-int8; null: "
        "quantization_aware_training's.",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole recipe.

    `path` is its file; `places` has the place of each key that it or the command line set.
    """

    path: str
    places: Mapping[str, str] = field(default_factory=dict)
    # a line for each name of published files that stands for another (module_names)
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

    @property
    def alone(self) -> "Recipe":
        """The recipe of one of several adapters, as that of a run alone."""
        return replace(self, lora=replace(self.lora, adapters=()))

    def place_of(self, key: str) -> str:
        """Returns where `key` was set, for messages: a line of the file, the command line, or the
        file itself.
        """
        return self.places.get(key, self.path)

    @property
    def method_facts(self) -> MethodFacts:
        """The facts about the recipe's method that data, training and plan need."""
        return METHODS[self.method.method]

    @property
    def has_reference(self) -> bool:
        """Whether sampled completions are held to the model before training."""
        facts = self.method_facts
        return facts.samples and not facts.needs_teacher and self.method.beta > 0

    @property
    def teacher(self) -> Model | None:
        """A frozen second model to load: the teacher, or the reference of a method that samples;
        None without one.
        """
        if self.has_reference and self.trains_base:
            dtype: Any = "float32" if self.lora.use_peft else self.model.dtype
            return replace(self.model, dtype=dtype, trainable_modules=(), frozen_modules=())
        name = self.method.teacher_model_name_or_path
        if not self.method_facts.needs_teacher or name is None:
            return None
        revision = self.method.teacher_model_revision
        own = self.model
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
    def score_names(self) -> tuple[str, ...]:
        """The names of the scores that the output head computes; none where it has the
        vocabulary's.
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
        """The output head, where it computes scores, or values beside the vocabulary's."""
        if self.method_facts.rows == "classes":
            return ScoreHead(self.score_names, self.data.problem_type)
        return ScoreHead(
            self.score_names,
            reads_tokens=self.method_facts.rows == "steps",
            has_values=self.method_facts.has_critic,
        )

    @property
    def labels_are_indices(self) -> bool:
        """Whether a label is one of the head's outputs, so that an export can be measured by their
        cross entropy.
        """
        if self.method_facts.masks:  # whose forward is another
            return False
        facts = ROWS[self.method_facts.rows]
        has_several = self.data.problem_type == MULTI_LABEL
        is_class = facts.label in ("class", "steps") and not has_several
        return facts.head == "vocabulary" or (facts.head == "scores" and is_class)

    @property
    def samples_itself(self) -> bool:
        """Whether the model in training samples the completions that it learns from, not a
        server.
        """
        return self.method_facts.samples and self.rollout.vllm_server_base_url is None

    @property
    def trains_base(self) -> bool:
        """Whether more than new adapters is trained, so that a reference cannot be the model
        without them.
        """
        lora = self.lora
        is_changed = lora.modules_to_save or lora.adapter_name_or_path or self.model.added_tokens
        return not lora.use_peft or bool(is_changed)

    @property
    def document_data(self) -> Data:
        """`data`, with the limits of its documents: prompts leave room for completions, and none is
        cut.
        """
        if not self.method_facts.samples:
            return self.data
        most = self.data.max_length - self.rollout.max_completion_length
        return replace(self.data, max_length=most, overlength=self.data.overlength or "drop")

    @property
    def group_size(self) -> int:
        """Documents in a group, which no batch takes apart."""
        return ROWS[self.method_facts.rows].count_documents(self.data.num_negatives)

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: max_length for each document of a group, so that any pair
        fits.
        """
        return self.data.max_length * self.group_size


SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]
    for f in fields(Recipe)
    if f.name not in ("path", "places", "renamed")
}


# The sections and keys in which one of several adapters may differ; all else is of the base.
SECTIONS_OF_ADAPTERS = ("lora", "optimization")
KEYS_OF_ADAPTERS = ("datasets", "eval_datasets", "eval_split_size", "seed")


@cache
def adapter_keys() -> dict[str, Key]:
    """Returns the keys of an entry of `adapters`, but for its name."""
    return {
        name: key
        for name, key in recipe_keys().items()
        if (key.section in SECTIONS_OF_ADAPTERS and name not in ("use_peft", "adapters"))
        or name in KEYS_OF_ADAPTERS
    }


NESTED: dict[str, type] = {"datasets": DatasetSource, "eval_datasets": DatasetSource}


@cache
def recipe_keys() -> dict[str, Key]:
    """Returns every top-level key of a recipe file, by name."""
    return {
        name: key
        for section, schema in SECTIONS.items()
        for name, key in keys_of(schema, section).items()
    }


def compute_global_batch_size(batch: Batch, world_size: int) -> int:
    """Counts the rows of an optimizer step over all ranks."""
    if batch.global_batch_size is not None:
        return batch.global_batch_size
    return batch.per_device_train_batch_size * (batch.gradient_accumulation_steps or 1) * world_size
