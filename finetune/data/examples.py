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
from finetune.data.token_store import TokenStore
from finetune.errors import UserError
from finetune.units import counted

Overlength = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation or text, or a stretch of one, as tokens."""

    input_ids: NDArray[np.int32]  # [tokens]
    # [tokens]: the id to predict at this position, the next token's, or IGNORE_INDEX
    labels: NDArray[np.int32]


COLUMNS = ("document", "start", "lengths", "trained")  # of `Examples`, beside the store of each


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples of several stores.

    An example's id is its index here. Returned by `cut`, `join`, `take`.
    """

    stores: tuple[TokenStore, ...]
    store: NDArray[np.int32]  # [examples]: index into `stores`
    document: NDArray[np.int64]  # [examples]: index into the store's documents
    start: NDArray[np.int64]  # [examples]: the first token, counted over the store
    lengths: NDArray[np.int32]  # [examples]: tokens
    trained: NDArray[np.int32]  # [examples]: tokens with a label
    # examples that belong together, one after another: 2 for chosen and rejected
    group_size: int = 1

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self) // self.group_size

    def __getitem__(self, example_id: int) -> Example:
        store = self._store_of(example_id)
        start = int(self.start[example_id])
        length = int(self.lengths[example_id])
        return Example(
            store.input_ids[start : start + length], store.labels[start : start + length]
        )

    def take(self, ids: NDArray[np.int64]) -> "Examples":
        """The examples `ids`, numbered in that order; an id may come more than once.

        No group is taken apart.
        """
        taken: dict[str, Any] = {name: getattr(self, name)[ids] for name in ("store", *COLUMNS)}
        return replace(self, **taken)

    def take_groups(self, groups: NDArray[np.int64]) -> "Examples":
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
        """[examples]: what `column`, of the documents of each store, has of theirs."""
        columns = [column(store) for store in self.stores]
        values = np.zeros(len(self), columns[0].dtype)
        for number, of_store in enumerate(columns):
            mine = self.store == number
            values[mine] = of_store[self.document[mine]]
        return values

    def answers(self) -> "Examples":
        """Returns the answers that are worth imitating, each alone: every example, the chosen sides
        of pairs, or answers rated good.
        """
        if self.group_size == 1:
            return self
        return replace(
            self.take(np.flatnonzero(self.find_ratings() >= 0) * self.group_size), group_size=1
        )

    def count_images(self, example_id: int) -> int:
        """The images of an example."""
        return self._store_of(example_id).count_images(int(self.document[example_id]))

    def read_images(self, example_id: int) -> list[EncodedImage]:
        """The images of an example, which holds all of its document's."""
        return self._store_of(example_id).read_images(int(self.document[example_id]))

    def read_row(self, example_id: int) -> Any:
        """Reads the row that a prompt comes from, for the rewards."""
        return self._store_of(example_id).read_row(int(self.document[example_id]))

    @property
    def has_images(self) -> bool:
        return any(store.first_images is not None for store in self.stores)

    def where(self, example_id: int) -> str:
        """The file and the line or row that an example comes from: `data/math.jsonl:17`."""
        return self._store_of(example_id).where(int(self.document[example_id]))

    def _store_of(self, example_id: int) -> TokenStore:
        return self.stores[int(self.store[example_id])]

    def refuse_typed_images(self, image_token_ids: Sequence[int]) -> None:
        """Raises `UserError` where a document without an image holds an image's token, which
        another's would take.
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
    """The documents of more than max_length tokens, by what was done with them."""

    truncated: NDArray[np.int64]  # their indexes in the store
    dropped: NDArray[np.int64]
    split: NDArray[np.int64]
    tokens_lost: int
    trained_tokens_lost: int


def cut(store: TokenStore, max_length: int, overlength: Overlength | None) -> tuple[Examples, Cuts]:
    """The store's documents as examples of at most `max_length` tokens.

    `overlength` None: plain text is split into several examples, and anything else is truncated.
    Labels are those of the whole document: the last token of a cut example still has its successor
    as label, so that splitting loses no target. A group with a long document is dropped whole.
    Raises `UserError` where a document is longer and `overlength` is `error`.
    """
    lengths = np.diff(store.starts)
    overlong = lengths > max_length
    if overlength == "error" and overlong.any():
        raise UserError(_say_overlong(store, lengths, max_length))
    _refuse_torn(store, overlong, max_length, overlength)
    size = store.group_size
    to_drop = np.repeat(overlong.reshape(-1, size).any(1), size) & (overlength == "drop")
    to_split = overlong & (store.is_text if overlength is None else overlength == "split")
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


def _say_overlong(store: TokenStore, lengths: NDArray[np.int64], max_length: int) -> str:
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


def _cut_into(store: TokenStore, parts: NDArray[np.int64], max_length: int) -> Examples:
    """The examples of all documents, each cut into so many `parts` of `max_length` tokens; what is
    left behind the last part is lost.

    parts: int64[documents]
    """
    document = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = store.starts[:-1][document] + part * max_length
    left = store.starts[1:][document] - start
    length = np.minimum(left, max_length).astype(np.int32)
    trained = store.trained[document].astype(np.int32)
    for i in np.flatnonzero((left > max_length) | (part > 0)):
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
    """All sources' examples, each as often as its weight: 2 is twice, 0.5 is a half of them, drawn
    by the seed.
    """
    return join([_weigh(part, sources[i].weight, seed, i) for i, part in enumerate(parts)])


def _weigh(examples: Examples, weight: float, seed: int, number: int) -> Examples:
    if weight == 1:
        return examples
    whole, rest = divmod(weight, 1.0)
    count = examples.groups
    drawn = make_generator(seed, "weights", number).permutation(count)
    drawn = drawn[: max(round(rest * count), 0 if whole else 1)]  # no source vanishes
    return examples.take_groups(
        np.concatenate([np.tile(np.arange(count), int(whole)), np.sort(drawn)])
    )


def hold_out(examples: Examples, size: float, seed: int) -> tuple[Examples, Examples]:
    """Returns (examples to train on, held-out ones), of which `size` is a share (below 1) or a
    count of rows.

    All that comes of a row (stretches, groups, repetitions) stays on one side. Raises `UserError`
    if one is empty.
    """
    rows, of = np.unique(
        _number(examples.store, examples.look_up(number_rows)), return_inverse=True
    )
    total = len(rows)
    count = round(size * total) if size < 1 else int(size)
    if not 0 < count < total:
        raise UserError(
            f"eval_split_size: {size:g} of {total} rows is {count}, which leaves none to "
            f"{'measure' if count == 0 else 'train'} on; set another size, or name other rows in "
            "eval_datasets"
        )
    held = np.zeros(total, bool)
    held[make_generator(seed, "held out").permutation(total)[:count]] = True
    is_held = held[of]
    return examples.take(np.flatnonzero(~is_held)), _drop_repeats(
        examples.take(np.flatnonzero(is_held))
    )


def number_rows(store: TokenStore) -> NDArray[np.int64]:
    """int64[documents]: the row that each comes of, counted over the store."""
    is_next = (np.diff(store.files) != 0) | (np.diff(store.rows) != 0)
    return np.append(0, np.cumsum(is_next))


def _drop_repeats(examples: Examples) -> Examples:
    """Drops the repetitions that a weight above 1 made."""
    _, first = np.unique(_number(examples.store, examples.start), return_index=True)
    return examples.take(np.sort(first))


def _number(store: NDArray[np.int32], within: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each (store, place within it); far quicker to sort than pairs."""
    return (store.astype(np.int64) << 44) | within


@dataclass(frozen=True, slots=True)
class Prompt:
    """A held-out question and its true answer."""

    prompt_ids: list[int]  # up to where the assistant (or the completion) begins
    answer: str  # without special tokens and the white space around it
    images: tuple[EncodedImage, ...] = ()  # of the question


def cut_prompts(examples: Examples, count: int, tokenizer: Any) -> list[Prompt]:
    """At most `count` examples (chosen sides of pairs) that ask something, cut where the last
    answer begins.
    """
    examples = examples.answers()
    prompts: list[Prompt] = []
    for example_id in range(len(examples)):
        if len(prompts) == count:
            break
        prompt = _cut_prompt(examples[example_id], tokenizer)
        images = tuple(examples.read_images(example_id)) if prompt else ()
        prompts += [replace(prompt, images=images)] if prompt else []
    return prompts


def _cut_prompt(example: Example, tokenizer: Any) -> Prompt | None:
    """Cuts an example before the last stretch that it trains on; returns None for one that asks
    nothing, such as plain text.
    """
    trained = np.flatnonzero(example.labels != IGNORE_INDEX)
    if len(trained) == 0:
        return None
    breaks = np.flatnonzero(np.diff(trained) > 1)
    first = int(trained[breaks[-1] + 1] if len(breaks) else trained[0])
    prompt_ids = example.input_ids[: first + 1].tolist()
    if first == 0 or set(prompt_ids) <= set(tokenizer.all_special_ids):
        return None
    answer: str = tokenizer.decode(
        example.labels[first : trained[-1] + 1].tolist(), skip_special_tokens=True
    )
    return Prompt(prompt_ids, answer.strip())


def expand_groups(groups: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The documents of `groups`, in that order; group g is documents g x size to (g + 1) x size -
    1.

    >>> expand_groups(np.array([3, 0]), 2)
    array([6, 7, 0, 1])
    """
    return (groups[:, None] * size + np.arange(size)).reshape(-1)


def make_generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """Random numbers that are a pure function of the arguments; each purpose has its own."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, number, *purpose.encode()]))
    )
