"""Ranks the lines of a file by their cosine to a query, with an exported embedder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from finetune.data.messages import BadRow, list_columns
from finetune.data.retrieval import POSITIVE
from finetune.data.sources import read_file
from finetune.errors import UserError, print_styled, printable
from finetune.export.sentence_transformer import LIMITS, MODULES, POOLING, SETTINGS
from finetune.files.json_files import load_json, write_json_line
from finetune.inference.conversation import read_turn
from finetune.inference.inference_model import LoadOptions, load_trunk
from finetune.inference.inputs import ModelLocation

BATCH = 16  # texts in a forward
COLUMNS = ("text", *POSITIVE)  # the columns that may hold a document, in order of precedence


@dataclass(frozen=True, slots=True)
class Embedder:
    """A model that embeds texts. Returned by `load_embedder`."""

    model: Any  # transformers' model without a head
    tokenizer: Any
    takes_mean: bool  # True: pools by the mean over tokens; False: takes the last token
    prompts: dict[str, str]  # "query" or "document" -> the text that is put in front of it

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], kind: Literal["query", "document"]) -> Tensor:
        """Embeds each text as a vector of length 1: fp32[texts, hidden], on the host."""
        prompt = self.prompts.get(kind) or ""
        # texts of similar length share a batch, so that it needs little padding
        order = torch.tensor([len(text) for text in texts]).argsort()
        batches = []
        for first in range(0, len(texts), BATCH):
            indexes = order[first : first + BATCH].tolist()
            batch = [prompt + texts[index] for index in indexes]
            inputs = self.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            inputs = inputs.to(self.model.device)
            states = self.model(**inputs).last_hidden_state.float()
            batches.append(self._pool(states, inputs["attention_mask"]))
        in_order = torch.cat(batches)[order.argsort()]
        return functional.normalize(in_order, dim=1).cpu()

    def _pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Pools the states of tokens to one vector for each text.

        Args:
            states: fp32[texts, tokens, hidden].
            mask: int64[texts, tokens], 0 at the padding, which is on the right.

        Returns:
            fp32[texts, hidden].
        """
        counts = mask.sum(1)
        if self.takes_mean:
            return (states * mask[:, :, None]).sum(1) / counts[:, None]
        return states[torch.arange(len(states)), counts - 1]


@dataclass(frozen=True, slots=True)
class RankedLine:
    """A document of a file."""

    number: int  # of the line or row in the file, from 1
    text: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """The documents of a file and their embeddings."""

    embedder: Embedder
    lines: Sequence[RankedLine]
    vectors: Tensor  # fp32[lines, hidden], of length 1
    nearest: int  # how many documents `find` returns at most

    def find(self, query: str) -> list[tuple[RankedLine, float]]:
        """Returns the documents nearest to the query with their cosines, the largest first."""
        cosines = self.vectors @ self.embedder.embed([query], "query")[0]
        top = cosines.topk(min(self.nearest, len(self.lines)))
        lines = [self.lines[index] for index in top.indices.tolist()]
        return list(zip(lines, top.values.tolist(), strict=True))


def load_embedder(location: ModelLocation, options: LoadOptions) -> Embedder:
    """Loads an exported embedder on the machine's GPUs, or on its CPU.

    Raises `UserError` if the folder is no such export, or cannot be loaded.
    """
    folder = Path(location.name)
    if not (folder / MODULES).is_file():
        raise UserError(
            f"{location.name}: no export of embeddings (it has no {MODULES}); --rank takes "
            "what method: embed exports"
        )
    model, tokenizer = load_trunk(location, options)
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    limit = load_json(folder / LIMITS).get("max_seq_length")
    if limit is not None:
        tokenizer.model_max_length = limit
    pooling = load_json(folder / POOLING)
    prompts = load_json(folder / SETTINGS).get("prompts") or {}
    return Embedder(model, tokenizer, bool(pooling.get("pooling_mode_mean_tokens")), prompts)


def read_lines(path: str) -> list[RankedLine]:
    """Reads documents: the lines of a text file, or the first of COLUMNS in each row of a table.

    Leaves out empty documents. Raises `UserError` if a row has none of these columns, or if no
    document is left.
    """
    lines = []
    for number, row in read_file(path):
        if isinstance(row, BadRow):
            raise UserError(f"{path}:{number}: {row}")
        text = next((row[name] for name in COLUMNS if isinstance(row.get(name), str)), None)
        if text is None:
            raise UserError(
                f"{path}:{number}: no document; its columns are {list_columns(row) or 'none'}, and "
                f"one of {', '.join(COLUMNS)} is expected"
            )
        if text.strip():
            lines.append(RankedLine(number, text))
    if not lines:
        raise UserError(f"{path}: holds no lines to rank")
    return lines


def rank_queries(ranking: Ranking, queries: Sequence[str], *, as_json: bool) -> None:
    """Prints the documents nearest to each query.

    as_json: Prints a JSON line for each query, in place of a line for each document.
    """
    for index, query in enumerate(queries):
        if as_json:
            ranked = [
                {"line": line.number, "text": line.text, "cosine": cosine}
                for line, cosine in ranking.find(query)
            ]
            print(write_json_line({"query": query, "ranked": ranked}), flush=True)
            continue
        if len(queries) > 1:
            empty_line = "\n" if index > 0 else ""
            print(f"{empty_line}> {query}")
        print("\n".join(format_ranked(ranking, query)))


def converse_ranked(ranking: Ranking) -> None:
    """Reads queries from the terminal and prints the nearest documents, until /exit or Ctrl-D."""
    while (query := read_turn()) is not None:
        if query in ("/exit", "/quit"):
            return
        if query.startswith("/"):
            print_styled("a query, or /exit", "dim")
        elif query:
            print("\n".join(format_ranked(ranking, query)))
            print()


def format_ranked(ranking: Ranking, query: str) -> Iterator[str]:
    """Yields a line for each document nearest to the query: its cosine, number and text."""
    width = len(str(ranking.lines[-1].number))
    for line, cosine in ranking.find(query):
        text = printable(" ".join(line.text.split()))
        yield f"{cosine:7.4f}  {line.number:>{width}}: {text}"
