"""Examples: parts of stored documents of at most `max_length` tokens each.

This module cuts them from documents, mixes them by the weights of their sources, holds some out for
evaluation, and makes prompts of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.images import EncodedImage
from finetune.data.token_store import Int32s, Int64s, TokenStore
from finetune.errors import UserError
from finetune.units import counted

Overlength = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of a conversation or a text, or of a part of one."""

    input_ids: Int32s  # [tokens]
    # [tokens]: the id to predict at this position (the id of the next token), or IGNORE_INDEX
    labels: Int32s


# the fields of `Examples` with a value for each example, besides `store`
COLUMNS = ("document", "start", "lengths", "trained")


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples of several stores, as their places in the stores.

    The id of an example is its index in the arrays. Returned by `cut`, `join` and `take`.
    """

    stores: tuple[TokenStore, ...]
    store: Int32s  # [examples]: index into `stores`
    document: Int64s  # [examples]: index into the store's documents
    start: Int64s  # [examples]: index of the first token in the store's `input_ids`
    lengths: Int32s  # [examples]: number of tokens
    trained: Int32s  # [examples]: number of tokens with a label
    # how many consecutive examples are a group: 2 for chosen and rejected
    group_size: int = 1
    # whether the label of an example's last position, a token of the next part, is left out
    omits_next: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self) // self.group_size

    def __getitem__(self, example_id: int) -> Example:
        store = self.store_of(example_id)
        start = int(self.start[example_id])
        length = int(self.lengths[example_id])
        labels = store.labels[start : start + length]
        if self.omits_next:
            labels = np.append(labels[:-1], np.int32(IGNORE_INDEX))
        return Example(store.input_ids[start : start + length], labels)

    def take(self, ids: Int64s) -> "Examples":
        """Returns the examples `ids` in that order, with new ids from 0; an id may be repeated.

        The result has the same `group_size`, so `ids` must list the groups' examples together.
        """
        columns: dict[str, Any] = {name: getattr(self, name)[ids] for name in ("store", *COLUMNS)}
        return replace(self, **columns)

    def take_groups(self, groups: Int64s) -> "Examples":
        """Returns the examples of `groups` in that order; a group may be repeated."""
        return self.take(expand_groups(groups, self.group_size))

    @property
    def is_rated(self) -> bool:
        """Whether the first example of each group is a rated answer."""
        return self.stores[0].is_rated

    def find_group_ratings(self) -> NDArray[np.int8]:
        """Returns the rating of each group, int8[groups]: 1 good, -1 bad, 0 unrated."""
        return self.look_up(lambda store: store.ratings)[:: self.group_size]

    def look_up(self, column: Callable[[TokenStore], NDArray[Any]]) -> NDArray[Any]:
        """Returns a value for each example, [examples]: that of its document.

        Args:
            column: Returns the values of a store's documents, [documents].
        """
        columns = [column(store) for store in self.stores]
        values = np.zeros(len(self), columns[0].dtype)
        for number, document_values in enumerate(columns):
            is_in_store = self.store == number
            values[is_in_store] = document_values[self.document[is_in_store]]
        return values

    def keep_good_answers(self) -> "Examples":
        """Returns the answers that are worth imitating, each in a group of its own.

        They are the chosen answers of pairs, or the answers that are rated good. Where nothing is
        compared, they are all examples.
        """
        if self.group_size == 1:
            return self
        # 0 is the rating of a pair, whose first example is the chosen answer
        good_groups = np.flatnonzero(self.find_group_ratings() >= 0)
        first_ids = good_groups * self.group_size
        return replace(self.take(first_ids), group_size=1)

    def begins_document(self, example_id: int) -> bool:
        """Whether an example holds the first token of its document."""
        store = self.store_of(example_id)
        return bool(self.start[example_id] == store.starts[self.document[example_id]])

    def ends_document(self, example_id: int) -> bool:
        """Whether an example holds the last token of its document."""
        store = self.store_of(example_id)
        end = self.start[example_id] + self.lengths[example_id]
        return bool(end == store.starts[self.document[example_id] + 1])

    def trains_next_token(self, example_id: int) -> bool:
        """Whether the label of an example's last token is the first token after the example."""
        store = self.store_of(example_id)
        end = self.start[example_id] + self.lengths[example_id]
        is_cut = end < store.starts[self.document[example_id] + 1]
        return bool(is_cut and self[example_id].labels[-1] != IGNORE_INDEX)

    def count_images(self, example_id: int) -> int:
        """Counts the images of an example."""
        return self.store_of(example_id).count_images(int(self.document[example_id]))

    def read_images(self, example_id: int) -> list[EncodedImage]:
        """Reads the images of an example: all those of its document, for `cut` takes none away."""
        return self.store_of(example_id).read_images(int(self.document[example_id]))

    def read_row(self, example_id: int) -> Any:
        """Reads the row that a prompt comes from, for the rewards."""
        return self.store_of(example_id).read_row(int(self.document[example_id]))

    @property
    def has_images(self) -> bool:
        """Whether any document of the stores has an image."""
        return any(store.first_images is not None for store in self.stores)

    def where(self, example_id: int) -> str:
        """Names the file and the line or row that an example comes from: `data/math.jsonl:17`."""
        return self.store_of(example_id).where(int(self.document[example_id]))

    def store_of(self, example_id: int) -> TokenStore:
        """Returns the store of an example."""
        return self.stores[int(self.store[example_id])]

    def refuse_typed_images(self, image_token_ids: Sequence[int]) -> None:
        """Raises `UserError` if a document without images holds an image token as typed text.

        At that token the model would put the features of another document's image.
        """
        for store in self.stores:
            positions = np.flatnonzero(np.isin(store.input_ids, image_token_ids))
            documents = np.unique(np.searchsorted(store.starts, positions, side="right") - 1)
            typed = [
                document for document in documents.tolist() if not store.count_images(document)
            ]
            if typed:
                raise UserError(
                    f"{store.where(typed[0])}: its text holds a token of an image, and the row has "
                    "no image"
                )


def count_trained(documents: Examples | TokenStore, ids: Int64s | slice = slice(None)) -> int:
    """Counts the tokens of documents or examples that are trained on.

    The mismatched documents of rated answers have labels, but no gradient: they do not count.

    `ids`: those to count, the members of each group side by side; by default all.
    """
    trained = documents.trained[ids]
    if documents.is_rated:
        trained = trained[:: documents.group_size]
    return int(trained.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Cuts:
    """What `cut` did with documents of more than max_length tokens, and how many tokens it lost."""

    truncated: Int64s  # indexes of the truncated documents in the store, but no mismatched ones
    dropped: Int64s  # indexes of the dropped ones: all documents of a group with a long one
    split: Int64s  # indexes of those that became several examples
    tokens_lost: int
    trained_tokens_lost: int


def cut(
    store: TokenStore, max_length: int, overlength: Overlength | None, omits_next: bool = False
) -> tuple[Examples, Cuts]:
    """Cuts the documents of a store into examples of at most `max_length` tokens.

    An example keeps the document's labels. The label of its last token is thus the first token of
    the next part, and splitting loses no label, unless `omits_next`.

    Args:
        store: The documents.
        max_length: The most tokens that an example may have.
        overlength: What is done with longer documents. None: plain text is split, anything else is
            truncated. `drop` drops the whole group of a long document. The mismatched document of a
            rated answer is always truncated: its length is that of another row's answer.
        omits_next: Leaves out the label that is the first token of the next part: a method that
            predicts only tokens which the model reads masked has no loss there.

    Raises:
        UserError: A document is longer and `overlength` is `error`; or an image would be cut.
    """
    lengths = np.diff(store.starts)
    size = store.group_size
    overlong = lengths > max_length
    if store.is_rated:
        overlong[1::size] = False
    if overlength == "error" and overlong.any():
        raise UserError(_say_overlong(store, lengths, overlong, max_length))
    _refuse_torn(store, overlong, max_length, overlength)
    in_long_group = np.repeat(overlong.reshape(-1, size).any(1), size)
    to_drop = in_long_group & (overlength == "drop")
    if overlength is None:
        to_split = overlong & store.is_text
    else:
        to_split = overlong & (overlength == "split")
    parts_if_split = (lengths + max_length - 1) // max_length  # rounded up
    part_counts = np.where(to_split, parts_if_split, 1)
    part_counts[to_drop] = 0
    examples = _cut_into_parts(store, part_counts, max_length, omits_next)
    cuts = Cuts(
        truncated=np.flatnonzero(overlong & ~to_drop & ~to_split),
        dropped=np.flatnonzero(to_drop),
        split=np.flatnonzero(to_split),
        tokens_lost=int(lengths.sum() - examples.lengths.sum(dtype=np.int64)),
        trained_tokens_lost=count_trained(store) - count_trained(examples),
    )
    return examples, cuts


def _say_overlong(
    store: TokenStore, lengths: Int64s, overlong: NDArray[np.bool_], max_length: int
) -> str:
    """Writes the message that documents are too long.

    Args:
        store: The documents.
        lengths: int64[documents]: number of tokens.
        overlong: bool[documents]: which are too long.
        max_length: The most tokens that are allowed.
    """
    rows = len(np.unique(number_rows(store)[overlong]))  # a row may become several documents
    ways = "truncate, drop or split" if store.group_size == 1 else "truncate or drop"
    first = store.where(int(np.argmax(overlong)))
    return (
        f"{first}: more than max_length = {max_length} tokens (overlength: error); "
        f"{counted(rows, 'row')} {'is' if rows == 1 else 'are'}, the longest of "
        f"{int(lengths[overlong].max())} tokens; raise max_length or set overlength to {ways}"
    )


def _cut_into_parts(
    store: TokenStore, part_counts: Int64s, max_length: int, omits_next: bool
) -> Examples:
    """Cuts each document into parts of `max_length` tokens, each of which is an example.

    The tokens behind the last part of a document are lost.

    Args:
        store: The documents.
        part_counts: int64[documents]: how many parts of each document are kept; 0: none.
        max_length: Tokens of a part; the last of a document may have fewer.
        omits_next: As in `cut`.
    """
    document = np.repeat(np.arange(len(part_counts)), part_counts)  # [examples]
    first_example = np.cumsum(part_counts) - part_counts  # [documents]
    # [examples]: the number of each among the parts of its document, from 0
    part = np.arange(len(document)) - np.repeat(first_example, part_counts)
    start = store.starts[:-1][document] + part * max_length
    remaining = store.starts[1:][document] - start  # tokens to the end of the document
    length = np.minimum(remaining, max_length).astype(np.int32)
    trained = store.trained[document].astype(np.int32)
    is_partial = (remaining > max_length) | (part > 0)
    for i in np.flatnonzero(is_partial):
        labels = store.labels[start[i] : start[i] + length[i] - omits_next]
        trained[i] = np.count_nonzero(labels != IGNORE_INDEX)
    return Examples(
        stores=(store,),
        store=np.zeros(len(document), np.int32),
        document=document,
        start=start,
        lengths=length,
        trained=trained,
        group_size=store.group_size,
        omits_next=omits_next,
    )


def _refuse_torn(
    store: TokenStore, overlong: NDArray[np.bool_], max_length: int, overlength: Overlength | None
) -> None:
    """Raises `UserError` if cutting a long document would separate it from an image.

    Truncation may cut off tokens of an image. Splitting always separates some: each example is
    given all images of its document.

    Args:
        store: The documents.
        overlong: bool[documents]: which have more than `max_length` tokens.
        max_length: The most tokens that an example may have.
        overlength: As in `cut`.
    """
    if store.first_images is None or overlength == "drop":
        return
    torn = []
    image_counts = np.diff(store.first_images)
    for document in np.flatnonzero(overlong & (image_counts > 0)).tolist():
        cut_off = store.input_ids[store.starts[document] + max_length : store.starts[document + 1]]
        if overlength == "split" or np.isin(cut_off, store.facts["image_token_ids"]).any():
            torn.append(document)
    if torn:
        raise UserError(
            f"{store.where(torn[0])}: an image that max_length = {max_length} tokens would cut; "
            f"{counted(len(torn), 'document')} of this kind; raise max_length, or set overlength: "
            "drop"
        )


def join(parts: Sequence[Examples]) -> Examples:
    """The examples of all `parts`, one part after the other."""
    store_counts = [len(part.stores) for part in parts]
    first_stores = np.cumsum([0, *store_counts[:-1]])  # of each part, in the joined `stores`
    stores = tuple(store for part in parts for store in part.stores)
    store = np.concatenate(
        [part.store + np.int32(first) for part, first in zip(parts, first_stores, strict=True)]
    )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS
    }
    return replace(parts[0], stores=stores, store=store, **columns)


def mix_sources(parts: Sequence[Examples], sources: Sequence[DatasetSource], seed: int) -> Examples:
    """Joins the examples of all sources after applying each source's weight to its groups.

    Weight 2: every group comes twice. Weight 0.5: half of the groups, drawn by the seed.

    Args:
        parts: The examples of each source.
        sources: The sources, with their weights.
        seed: Decides which groups are drawn for the fraction of a weight.
    """
    return join([_weigh(part, sources[i].weight, seed, i) for i, part in enumerate(parts)])


def _weigh(examples: Examples, weight: float, seed: int, number: int) -> Examples:
    """Applies the weight of source `number`: repeats its groups, and draws a fraction of them."""
    if weight == 1:
        return examples
    repeats, fraction = divmod(weight, 1.0)
    count = examples.groups
    least_drawn = 0 if repeats else 1  # a small weight leaves at least one group of a source
    draw_count = max(round(fraction * count), least_drawn)
    drawn = make_generator(seed, "weights", number).permutation(count)[:draw_count]
    repeated = np.tile(np.arange(count), int(repeats))
    return examples.take_groups(np.concatenate([repeated, np.sort(drawn)]))


def hold_out(examples: Examples, size: float, seed: int) -> tuple[Examples, Examples]:
    """Splits examples into those to train on and those held out.

    All examples of a row (parts, groups, repetitions by weight) are on the same side. Repetitions
    of held-out examples are dropped.

    Args:
        examples: The examples of all sources.
        size: How many rows are held out: a share if below 1, else their number.
        seed: Decides which rows are held out.

    Returns:
        The examples to train on, and the held-out ones.

    Raises:
        UserError: One of the two would be empty.
    """
    row_keys = _make_keys(examples.store, examples.look_up(number_rows))
    rows, row_of_example = np.unique(row_keys, return_inverse=True)
    total = len(rows)
    count = round(size * total) if size < 1 else int(size)
    if not 0 < count < total:
        raise UserError(
            f"eval_split_size: {size:g} of {total} rows is {count}, which leaves none to "
            f"{'measure' if count == 0 else 'train'} on; set another size, or name other rows in "
            "eval_datasets"
        )
    is_row_held_out = np.zeros(total, bool)
    is_row_held_out[make_generator(seed, "held out").permutation(total)[:count]] = True
    is_held_out = is_row_held_out[row_of_example]
    to_train = examples.take(np.flatnonzero(~is_held_out))
    held_out = examples.take(np.flatnonzero(is_held_out))
    return to_train, _drop_repeats(held_out)


def number_rows(store: TokenStore) -> Int64s:
    """Numbers the rows of a store from 0, over all its files.

    Returns:
        int64[documents]: the number of the row that each document comes from.
    """
    begins_row = (np.diff(store.files) != 0) | (np.diff(store.rows) != 0)  # from the 2nd document
    return np.append(0, np.cumsum(begins_row))


def _drop_repeats(examples: Examples) -> Examples:
    """Drops the repetitions that a weight above 1 made."""
    keys = _make_keys(examples.store, examples.start)
    _, first_ids = np.unique(keys, return_index=True)
    return examples.take(np.sort(first_ids))


def _make_keys(store: Int32s, index: Int64s) -> Int64s:
    """Joins each (store, index in the store) to one number, which sorts far quicker than a pair.

    The lowest 44 bits hold the index.
    """
    return (store.astype(np.int64) << 44) | index


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the held-out data, with the answer that the data has for it."""

    prompt_ids: list[int]  # up to where the last answer begins
    answer: str  # without special tokens and the white space around it
    images: tuple[EncodedImage, ...] = ()  # of the example


def cut_prompts(examples: Examples, count: int, tokenizer: Any) -> list[Prompt]:
    """Makes prompts of the first `count` examples that have one, cut before the last answer.

    Of a pair, the chosen answer is used; bad answers are left out. So are examples that begin
    inside of a document or end inside of an answer: a right completion would not equal its part.
    """
    examples = examples.keep_good_answers()
    prompts: list[Prompt] = []
    for example_id in range(len(examples)):
        if len(prompts) == count:
            break
        if not examples.begins_document(example_id) or examples.trains_next_token(example_id):
            continue
        prompt = _cut_prompt(examples[example_id], tokenizer)
        if prompt is not None:
            images = tuple(examples.read_images(example_id))
            prompts.append(replace(prompt, images=images))
    return prompts


def _cut_prompt(example: Example, tokenizer: Any) -> Prompt | None:
    """Cuts an example before its last answer: the last run of consecutive trained positions.

    Returns None for an example without a prompt, such as plain text: only one token, or only
    special tokens, stand before the answer.
    """
    trained = np.flatnonzero(example.labels != IGNORE_INDEX)
    if len(trained) == 0:
        return None
    gaps = np.flatnonzero(np.diff(trained) > 1)
    run_start = gaps[-1] + 1 if len(gaps) else 0
    # a label is the next token's id, so this position is that of the prompt's last token
    prompt_end = int(trained[run_start])
    prompt_ids = example.input_ids[: prompt_end + 1].tolist()
    if prompt_end == 0 or set(prompt_ids) <= set(tokenizer.all_special_ids):
        return None
    answer_ids = example.labels[prompt_end : trained[-1] + 1].tolist()
    answer: str = tokenizer.decode(answer_ids, skip_special_tokens=True)
    return Prompt(prompt_ids, answer.strip())


def expand_groups(groups: Int64s, size: int) -> Int64s:
    """Lists the documents of `groups`, in that order. Group g has `size` documents from g x size.

    >>> expand_groups(np.array([3, 0]), 2)
    array([6, 7, 0, 1])
    """
    return (groups[:, None] * size + np.arange(size)).reshape(-1)


def make_generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """Makes a generator whose random numbers depend on the arguments alone.

    Args:
        seed: The run's seed.
        purpose: What the numbers are for: each purpose has numbers of its own.
        number: Which of several generators for one purpose.
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, number, *purpose.encode()]))
    )
