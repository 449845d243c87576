"""The section of a recipe that says what is trained on, and the keys of one entry of `datasets`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from finetune.config.markers import FileOrName, Positive, SameOnResume

Turns = Literal["auto", "split", "whole", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """One entry of `datasets` or `eval_datasets`."""

    path: Annotated[str, FileOrName, "A file, glob, folder or hub name."]
    name: Annotated[str | None, "The hub data set's configuration."] = None
    split: Annotated[str, "Which split, slices such as train[:5%] included."] = "train"
    type: Annotated[
        Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"] | None,
        "The rows' format; null: recognized from the columns.",
    ] = None
    weight: Annotated[
        float,
        Gt(0),
        "How often the rows of this source are read in an epoch: 0.5 reads half of them, 2 reads each twice.",
    ] = 1.0
    max_samples: Annotated[
        Positive | None,
        "Read this many of the rows, drawn by the seed; null: all. Of a stream the first ones, since to draw them it would "
        "have to be read to its end.",
    ] = None
    messages_column: Annotated[str | None, "The column that holds the messages, where it is not named as usual."] = None
    prompt_column: Annotated[str | None, "The column that holds the prompt or question."] = None
    completion_column: Annotated[str | None, "The column that holds the completion or answer."] = None
    text_column: Annotated[str | None, "The column that holds plain text."] = None
    chosen_column: Annotated[
        str | None, "The column that holds the better answer of a pair, or the conversation that ends in it."
    ] = None
    rejected_column: Annotated[str | None, "The column that holds the worse one."] = None
    label_column: Annotated[
        str | None, "The column that rates an answer: true for a good one, false for a bad one."
    ] = None
    alpaca_prompt: Annotated[
        bool,
        "Write the question of an alpaca row in the wording of Alpaca's authors (Below is an instruction ...), inside the "
        "user's turn; chat_template: alpaca writes that wording without turns.",
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """From files to rows of tokens."""

    datasets: Annotated[tuple[DatasetSource, ...], SameOnResume, "What is trained on."] = ()
    eval_datasets: Annotated[tuple[DatasetSource, ...], "What the held-out loss is measured on."] = ()
    eval_split_size: Annotated[
        float | None,
        Gt(0),
        SameOnResume,
        "Held out from datasets where no eval_datasets are named: a share below 1, else a count of rows.",
    ] = None
    chat_template: Annotated[
        str | None,
        FileOrName,
        SameOnResume,
        "null: the tokenizer's own; or the name of a model family's, such as chatml, llama3.1, mistral-v3, qwen3 or alpaca "
        "(all are in docs/data.md), a file, or inline Jinja.",
    ] = None
    chat_template_date: Annotated[
        str | None,
        SameOnResume,
        "The day, as 2026-01-31, that a chat template writes which asks for today's (Llama 3.2's, SmolLM3's, Granite's do); "
        "null: the day on which the run begins, for all of its ranks and restarts.",
    ] = None
    max_length: Annotated[
        int,
        Gt(1),
        SameOnResume,
        "Tokens in a row, and at most in an example; of a pair at most in each side, and a row holds twice as many.",
    ] = 2048
    packing: Annotated[bool, SameOnResume, "Fill rows with several examples, isolated from each other."] = True
    overlength: Annotated[
        Literal["truncate", "drop", "split", "error"] | None,
        SameOnResume,
        "What is done with an example of more than max_length tokens; always reported. null: plain text is split and "
        "anything else truncated.",
    ] = None
    assistant_only_loss: Annotated[bool, SameOnResume, "In conversations, train only on the assistant's turns."] = True
    turns: Annotated[
        Turns,
        SameOnResume,
        "How the turns of a conversation become documents. whole: one document, as the chat template writes the conversation. "
        "split: a document for each of the assistant's turns, with the prompt that the model has when it is asked for that turn. "
        "auto: whole where each turn has that prompt anyway, else as few documents as give it. last: the last turn alone.",
    ] = "auto"
    on_bad_row: Annotated[
        Literal["error", "skip"], SameOnResume, "What is done with a row that fits no known format; skips are counted."
    ] = "error"
    streaming: Annotated[bool, SameOnResume, "Read the data while training instead of before; needs max_steps."] = False
    dataset_num_proc: Annotated[Positive | None, "Threads that tokenize; null: one for each core."] = None
    dataset_cache_dir: Annotated[str | None, "Where tokenized rows are kept; null: in the Hugging Face cache."] = None
    dataloader_num_workers: Annotated[
        int, Ge(0), "Threads that build batches ahead of the step; 0 builds them in the loop."
    ] = 1
