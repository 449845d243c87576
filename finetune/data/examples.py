"""Examples: stretches of at most `max_length` tokens of stored documents; cut, mixed by weight,
held out, asked.
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
    """One conversation or text, or a stretch of one, as tokens."""

    input_ids: Int32s  # [tokens]
    # [tokens]: the id to predict at this position, the next token's, or IGNORE_INDEX
    labels: Int32s


COLUMNS = ("document", "start", "lengths", "trained")  # of `Examples`, beside the store of each


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples of several stores.

    An example's id is its index here. Returned by `cut`, `join`, `take`.
    """

    stores: tuple[TokenStore, ...]
    store: Int32s  # [examples]: index into `stores`
    document: Int64s  # [examples]: index into the store's documents
    start: Int64s  # [examples]: the first token, counted over the store
    lengths: Int32s  # [examples]: tokens
    trained: Int32s  # [examples]: tokens with a label
    # examples that belong together, one after another: 2 for chosen and rejected
    group_size: int = 1

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
        return Example(
            store.input_ids[start : start + length], store.labels[start : start + length]
        )

    def take(self, ids: Int64s) -> "Examples":
        """The examples `ids`, numbered in that order; an id may come more than once.

        No group is taken apart.
        """
        taken: dict[str, Any] = {name: getattr(self, name)[ids] for name in ("store", *COLUMNS)}
        return replace(self, **taken)

    def take_groups(self, groups: Int64s) -> "Examples":
        """The examples of `groups`, numbered in that order; a group may come more than once."""
        return self.take(expand_groups(groups, self.group_size))

    @property
    def is_rated(self) -> bool:
        """Whether the first example of each group is a rated answer."""
        return self.stores[0].is_rated

    def find_ratings(self) -> NDArray[np.int8]:
        """int8[groups]: 1 for a rated good answer, -1 for a bad one, 0 where nothing is rated."""
        return self.look_up(lambda store: store.ratings)[:: self.group_size]

    def look_up(self, column: Callable[[TokenStore], NDArray[Any]]) -> NDArray[Any]:
        """Returns for each example the value of its document: [examples].

        Args:
            column: Store -> the values of its documents, [documents].
        """
        columns = [column(store) for store in self.stores]
        values = np.zeros(len(self), columns[0].dtype)
        for number, of_documents in enumerate(columns):
            is_in_store = self.store == number
            values[is_in_store] = of_documents[self.document[is_in_store]]
        return values

    def answers(self) -> "Examples":
        """Returns the answers that are worth imitating, each in a group of its own.

        They are the chosen sides of pairs, or the answers that are rated good; where nothing is
        compared, every example.
        """
        if self.group_size == 1:
            return self
        good_groups = np.flatnonzero(self.find_ratings() >= 0)
        return replace(self.take(good_groups * self.group_size), group_size=1)

    def count_images(self, example_id: int) -> int:
        """The images of an example."""
        return self.store_of(example_id).count_images(int(self.document[example_id]))

    def read_images(self, example_id: int) -> list[EncodedImage]:
        """The images of an example, which holds all of its document's."""
        return self.store_of(example_id).read_images(int(self.document[example_id]))

    def read_row(self, example_id: int) -> Any:
        """Reads the row that a prompt comes from, for the rewards."""
        return self.store_of(example_id).read_row(int(self.document[example_id]))

    @property
    def has_images(self) -> bool:
        return any(store.first_images is not None for store in self.stores)

    def where(self, example_id: int) -> str:
        """The file and the line or row that an example comes from: `data/math.jsonl:17`."""
        return self.store_of(example_id).where(int(self.document[example_id]))

    def store_of(self, example_id: int) -> TokenStore:
        return self.stores[int(self.store[example_id])]

    def refuse_typed_images(self, image_token_ids: Sequence[int]) -> None:
        """Raises `UserError` where a document without an image holds the token of one.

        The model would put there the pixels of another document's image.
        """
        for store in self.stores:
            places = np.flatnonzero(np.isin(store.input_ids, image_token_ids))
            documents = np.unique(np.searchsorted(store.starts, places, side="right") - 1)
            typed = [
                document for document in documents.tolist() if not store.count_images(document)
            ]
            if typed:
                raise UserError(
                    f"{store.where(typed[0])}: its text holds a token of an image, and the row has "
                    "no image"
                )


@dataclass(frozen=True, slots=True)
class Cuts:
    """The documents of more than max_length tokens, by what was done with them; and what was lost.

    Returned by `cut`.
    """

    truncated: Int64s  # their indexes in the store
    dropped: Int64s
    split: Int64s
    tokens_lost: int
    trained_tokens_lost: int


def cut(store: TokenStore, max_length: int, overlength: Overlength | None) -> tuple[Examples, Cuts]:
    """Cuts the documents of a store into examples of at most `max_length` tokens.

    Labels are those of the whole document: the last token of a cut example still has its successor
    as label, so that splitting loses no target.

    Args:
        store: The documents.
        max_length: Tokens of an example.
        overlength: What becomes of longer documents; None: plain text is split, anything else is
            truncated. A group with a long document is dropped whole.

    Raises:
        UserError: A document is longer and `overlength` is `error`; or an image would be cut.
    """
    lengths = np.diff(store.starts)
    overlong = lengths > max_length
    if overlength == "error" and overlong.any():
        raise UserError(_say_overlong(store, lengths, max_length))
    _refuse_torn(store, overlong, max_length, overlength)
    size = store.group_size
    in_long_group = np.repeat(overlong.reshape(-1, size).any(1), size)
    to_drop = in_long_group & (overlength == "drop")
    is_split = store.is_text if overlength is None else overlength == "split"
    to_split = overlong & is_split
    parts = np.where(to_split, (lengths + max_length - 1) // max_length, 1)
    parts[to_drop] = 0
    examples = _cut_into(store, parts, max_length)
    trained_tokens = examples.trained.sum(dtype=np.int64)
    cuts = Cuts(
        truncated=np.flatnonzero(overlong & ~to_drop & ~to_split),
        dropped=np.flatnonzero(to_drop),
        split=np.flatnonzero(to_split),
        tokens_lost=int(lengths.sum() - examples.lengths.sum(dtype=np.int64)),
        trained_tokens_lost=int(store.trained.sum(dtype=np.int64) - trained_tokens),
    )
    return examples, cuts


def _say_overlong(store: TokenStore, lengths: Int64s, max_length: int) -> str:
    """Says which documents are too long, and what to do. `lengths`: [documents], in tokens."""
    overlong = np.flatnonzero(lengths > max_length)
    places = np.stack([store.files[overlong], store.rows[overlong]])
    rows = np.unique(places, axis=1).shape[1]  # several documents may come of one
    ways = "truncate, drop or split" if store.group_size == 1 else "truncate or drop"
    return (
        f"{store.where(int(overlong[0]))}: more than max_length = {max_length} tokens (overlength: "
        f"error); {counted(rows, 'row')} {'is' if rows == 1 else 'are'}, the longest of "
        f"{int(lengths.max())} tokens; raise max_length or set overlength to {ways}"
    )


def _cut_into(store: TokenStore, parts: Int64s, max_length: int) -> Examples:
    """Cuts each document into its number of parts of `max_length` tokens, an example each.

    What a document has behind its last part is lost.

    Args:
        store: The documents.
        parts: int64[documents]: the parts of each; 0: none of it is kept.
        max_length: Tokens of a part; the last may have fewer.
    """
    document = np.repeat(np.arange(len(parts)), parts)
    first_part = np.cumsum(parts) - parts  # of each document, counted over all
    part = np.arange(len(document)) - np.repeat(first_part, parts)
    start = store.starts[:-1][document] + part * max_length
    left = store.starts[1:][document] - start
    length = np.minimum(left, max_length).astype(np.int32)
    trained = store.trained[document].astype(np.int32)
    is_cut = (left > max_length) | (part > 0)
    for i in np.flatnonzero(is_cut):
        trained[i] = np.count_nonzero(store.labels[start[i] : start[i] + length[i]] != IGNORE_INDEX)
    stores = np.zeros(len(document), np.int32)
    return Examples((store,), stores, document, start, length, trained, store.group_size)


def _refuse_torn(
    store: TokenStore, overlong: NDArray[np.bool_], max_length: int, overlength: Overlength | None
) -> None:
    """Raises `UserError` where cutting a long document would leave an image out, or tear it."""
    if store.first_images is None or overlength == "drop":
        return
    torn = []
    for document in np.flatnonzero(overlong & (np.diff(store.first_images) > 0)).tolist():
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
    shifts = np.cumsum([0] + [len(part.stores) for part in parts])
    stores = tuple(store for part in parts for store in part.stores)
    store = np.concatenate(
        [part.store + np.int32(shift) for part, shift in zip(parts, shifts, strict=False)]
    )
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS
    }
    return replace(parts[0], stores=stores, store=store, **joined)


def mix_sources(parts: Sequence[Examples], sources: Sequence[DatasetSource], seed: int) -> Examples:
    """Joins the examples of all sources, each source's as often as its weight says.

    2: each of its groups twice; 0.5: a half of them, drawn by the seed.
    """
    return join([_weigh(part, sources[i].weight, seed, i) for i, part in enumerate(parts)])


def _weigh(examples: Examples, weight: float, seed: int, number: int) -> Examples:
    """Repeats or draws the groups of source `number`, as `mix_sources`."""
    if weight == 1:
        return examples
    whole, rest = divmod(weight, 1.0)
    count = examples.groups
    least = 0 if whole else 1  # no source vanishes
    drawn = make_generator(seed, "weights", number).permutation(count)
    drawn = drawn[: max(round(rest * count), least)]
    repeated = np.tile(np.arange(count), int(whole))
    return examples.take_groups(np.concatenate([repeated, np.sort(drawn)]))


def hold_out(examples: Examples, size: float, seed: int) -> tuple[Examples, Examples]:
    """Splits examples into those to train on and those held out.

    All that comes of a row (stretches, groups, repetitions) stays on one side. Of what is held out
    repetitions are dropped.

    Args:
        examples: Of all sources.
        size: The rows to hold out: a share of all below 1, else their number.
        seed: It decides which.

    Returns:
        The examples to train on, and the held-out ones.

    Raises:
        UserError: One of the two is empty.
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
    is_row_held = np.zeros(total, bool)
    is_row_held[make_generator(seed, "held out").permutation(total)[:count]] = True
    is_held = is_row_held[row_of_example]
    to_train = examples.take(np.flatnonzero(~is_held))
    held_out = examples.take(np.flatnonzero(is_held))
    return to_train, _drop_repeats(held_out)


def number_rows(store: TokenStore) -> Int64s:
    """Numbers the rows of a store: int64[documents], the row that each document comes of."""
    is_next = (np.diff(store.files) != 0) | (np.diff(store.rows) != 0)
    return np.append(0, np.cumsum(is_next))


def _drop_repeats(examples: Examples) -> Examples:
    """Drops the repetitions that a weight above 1 made."""
    keys = _make_keys(examples.store, examples.start)
    _, first = np.unique(keys, return_index=True)
    return examples.take(np.sort(first))


def _make_keys(store: Int32s, within: Int64s) -> Int64s:
    """Makes one number of each (store, place within it); they sort far quicker than pairs."""
    return (store.astype(np.int64) << 44) | within


@dataclass(frozen=True, slots=True)
class Prompt:
    """A held-out question and its true answer."""

    prompt_ids: list[int]  # up to where the assistant (or the completion) begins
    answer: str  # without special tokens and the white space around it
    images: tuple[EncodedImage, ...] = ()  # of the question


def cut_prompts(examples: Examples, count: int, tokenizer: Any) -> list[Prompt]:
    """Makes prompts of the first `count` examples that ask something, cut where the last answer
    begins; of a pair its chosen side.
    """
    examples = examples.answers()
    prompts: list[Prompt] = []
    for example_id in range(len(examples)):
        if len(prompts) == count:
            break
        prompt = _cut_prompt(examples[example_id], tokenizer)
        if prompt is not None:
            images = tuple(examples.read_images(example_id))
            prompts.append(replace(prompt, images=images))
    return prompts


def _cut_prompt(example: Example, tokenizer: Any) -> Prompt | None:
    """Cuts an example before the last stretch that it trains on; returns None for one that asks
    nothing, such as plain text.
    """
    trained = np.flatnonzero(example.labels != IGNORE_INDEX)
    if len(trained) == 0:
        return None
    breaks = np.flatnonzero(np.diff(trained) > 1)
    start_of_last = breaks[-1] + 1 if len(breaks) else 0
    first = int(trained[start_of_last])  # the position before the last answer's first token
    prompt_ids = example.input_ids[: first + 1].tolist()
    if first == 0 or set(prompt_ids) <= set(tokenizer.all_special_ids):
        return None
    answer_ids = example.labels[first : trained[-1] + 1].tolist()
    answer: str = tokenizer.decode(answer_ids, skip_special_tokens=True)
    return Prompt(prompt_ids, answer.strip())


def expand_groups(groups: Int64s, size: int) -> Int64s:
    """Lists the documents of `groups` in that order; group g has those from g x size on.

    >>> expand_groups(np.array([3, 0]), 2)
    array([6, 7, 0, 1])
    """
    return (groups[:, None] * size + np.arange(size)).reshape(-1)


def make_generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """Random numbers that are a pure function of the arguments; each purpose has its own."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, number, *purpose.encode()]))
    )
