"""The embedded engine: the model in training samples itself, on its own ranks, with a key-value
cache.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from finetune.config.pretrained import text_config_of
from finetune.constants import PROMPTS_AT_ONCE, Fields, Record, round_up
from finetune.data.images import EncodedImage, ImageProcessor
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import keep_gathered
from finetune.distributed.world import World
from finetune.errors import on_one_line
from finetune.models.attention import NAME as PACKED
from finetune.models.routing import Routing
from finetune.models.vision import find_prompt_positions
from finetune.rollout.engine import Ended, Request, Sampled, Sampling

# How many tokens a GPU samples before the host asks it which rows have ended, which waits for the
# GPU. Rows that have ended are sampled until then, and the surplus tokens are dropped.
TOKENS_BETWEEN_LOOKS = 16
# A captured step attends to a multiple of this many tokens. It is captured again for the next
# multiple.
CAPTURED_TOKENS = 256


class ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """The keys and values of a layer in memory that is reserved once.

    transformers' own class copies all of them for each token.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._reserved: tuple[Tensor, ...] = ()  # keys and values, [rows, heads, tokens, head size]
        self._place: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns the keys and values of all tokens, or of as many as `fix` said."""
        if self._place is not None:
            for reserved, states in zip(self._reserved, (key_states, value_states), strict=True):
                reserved.index_copy_(2, self._place, states)
            return self.keys, self.values
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._reserve(key_states, value_states)
        end = first + key_states.shape[2]
        for reserved, states in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[:, :, first:end] = states
        self._show(end)
        if first == 0:
            return (key_states, value_states)  # the same numbers, contiguous
        return (self.keys, self.values)

    def _reserve(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, size = key_states.shape
        values = value_states.new_empty(rows, heads, self._tokens, value_states.shape[3])
        if key_states.is_cuda:
            # Zeros, because a captured step multiplies masked places too.
            keys = key_states.new_zeros(rows, heads, self._tokens, size)
            self._reserved = keys, values.zero_()
        else:
            # A key's tokens are adjacent in memory: the product with one query reads them faster.
            keys = key_states.new_empty(rows, heads, size, self._tokens).transpose(2, 3)
            self._reserved = keys, values

    def fix(self, place: Tensor, shown: int) -> None:
        """Makes `update` write at `place` and return the first `shown` tokens.

        A captured step can then be replayed.

        place: int64[1], on the device.
        """
        self._place = place
        self._show(shown)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows `beam_idx` (transformers' name), in that order.

        It copies only rows that move, within the memory, unless the number of rows grows.
        """
        rows = len(beam_idx)
        length = self.get_seq_length()
        if rows > len(self.keys):
            self._reserved = tuple(reserved[beam_idx] for reserved in self._reserved)
        else:
            moved = (beam_idx != torch.arange(rows, device=beam_idx.device)).nonzero().squeeze(1)
            for reserved in self._reserved:
                reserved[moved] = reserved[beam_idx[moved]]
            self._reserved = tuple(reserved[:rows] for reserved in self._reserved)
        self._show(length)

    def fill(self, parts: Sequence[DynamicLayer], places: Tensor) -> None:
        """Copies tokens from the caches of prompts.

        Args:
            parts: This layer's caches of the prompts.
            places: int64[rows, tokens], each token's place among all tokens of all `parts`.
        """
        keys = _pick_tokens([part.keys for part in parts], places)
        values = _pick_tokens([part.values for part in parts], places)
        self.update(keys, values)

    def _show(self, length: int) -> None:
        self.keys, self.values = (reserved[:, :, :length] for reserved in self._reserved)


def _pick_tokens(states: Sequence[Tensor], places: Tensor) -> Tensor:
    """Picks tokens by their places among all tokens of all rows.

    Args:
        states: Keys or values, each [rows, heads, tokens, head size].
        places: int64[new rows, new tokens].

    Returns:
        [new rows, heads, new tokens, head size].
    """
    tokens = torch.cat([each.transpose(0, 1).flatten(1, 2) for each in states], 1)
    return tokens[:, places].transpose(0, 1)


def make_cache(config: Any, tokens: int) -> DynamicCache:
    """Makes a cache for rows of up to `tokens` tokens.

    Layers with a sliding window or a recurrent state keep transformers' own class.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        ReservedLayer(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class EmbeddedEngine:
    """Samples `rows` completions at once, then the next ones.

    It reads a prompt once for all of its completions. A completion that has ended leaves the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        stop_ids: Sequence[int],
        rows: int,
        *,
        images: ImageProcessor | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Samples from `model`.

        Args:
            model: The model in training, in any layout.
            world: The ranks.
            stop_ids: Token ids that end a completion.
            rows: The completions that are sampled at once.
            images: Reads the prompts' images; None where prompts have none.
            routing: Records the experts of each token; None where nothing replays them.
        """
        self._model = model
        self._images = images
        self._routing = routing
        self._world = world
        self._rows = rows
        self._stop_ids = torch.tensor(sorted(stop_ids), device=world.device)

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Samples a completion for each request.

        All ranks call it: together they gather the weights, and free them at the end.
        """
        was_training = self._model.training
        self._model.eval()
        recording = nullcontext() if self._routing is None else self._routing.recording()
        # Eager, because the many shapes of sampling would use up torch.compile's limit of graphs,
        # and training would run uncompiled.
        with keep_gathered(self._model), torch.compiler.set_stance("force_eager"), recording:
            sampled: list[Sampled] = []
            for start in range(0, len(requests), self._rows):
                sampled += self._sample_together(requests[start : start + self._rows], sampling)
        self._model.train(was_training)
        return sampled

    def forget(self) -> None:
        """Does nothing: the weights determine the completions, so there are no records to drop."""

    def _sample_together(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        reader = _PromptReader(unwrap(self._model), self._images, self._world.device)
        wave = _Wave(
            reader,
            requests,
            sampling,
            self._stop_ids,
            can_capture=_can_capture(self._world),
            routing=self._routing,
        )
        wave.run()
        return wave.list_sampled()


def _can_capture(world: World) -> bool:
    """Whether this rank's GPU samples a token without the other ranks."""
    return world.device.type == "cuda" and not world.sharding.divides_matrices and world.stages == 1


class _Wave:
    """Completions that are sampled together: each step draws one token for each.

    A step reads and writes tensors on the device alone. On a GPU it is captured as a CUDA graph and
    replayed: its kernels are so short that the host would need twice as long to launch them.
    """

    def __init__(
        self,
        reader: "_PromptReader",
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Tensor,
        *,
        can_capture: bool,
        routing: Routing | None = None,
    ) -> None:
        device = stop_ids.device
        limits = [sampling.limit(request) for request in requests]
        count = len(requests)
        self._transformer = reader.transformer
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._max_tokens = max(limits)
        prompts = _read_prompts(reader, requests, self._max_tokens)
        self._cache = prompts.cache
        self._mask = prompts.mask
        self._positions = prompts.positions
        self._logits = prompts.logits
        self._routing = routing
        if routing is not None:
            choices = routing.take_choices()  # of all tokens of the prompts
            ends = prompts.ends.flatten().tolist()
            self._experts_of_prompts = [
                choices[end - len(request.prompt_ids) : end].cpu().numpy()
                for end, request in zip(ends, requests, strict=True)
            ]
            # [requests, tokens, layers, chosen]: the experts of each sampled token
            self._experts = choices.new_full((count, self._max_tokens, *choices.shape[1:]), -1)
        # The tokens of a padded prompt.
        self._prompt_width = self._mask.shape[-1] - self._max_tokens
        self._places = torch.arange(self._mask.shape[-1], device=device)
        # Of all requests, whether their rows are kept or not: [requests, ...].
        self._limits = torch.tensor(limits, device=device)
        uniforms = np.stack([request.draw_uniforms(self._max_tokens) for request in requests])
        self._uniforms = torch.from_numpy(uniforms).to(device)
        self._tokens = torch.zeros(count, self._max_tokens, dtype=torch.int64, device=device)
        self._log_probabilities = torch.zeros(count, self._max_tokens, device=device)
        self._entropies = torch.zeros(count, self._max_tokens, device=device)
        self._lengths = self._limits.clone()
        self._is_open = torch.ones(count, dtype=torch.bool, device=device)
        self._is_stopped = torch.zeros(count, dtype=torch.bool, device=device)
        # Of the rows that are kept, as the cache, mask and positions are: [rows].
        self._request_of_row = torch.arange(count, device=device)
        self._drawn = torch.zeros(count, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)  # tokens drawn so far
        self._graph: _CapturedStep | None = None
        if can_capture and prompts.packs:
            self._graph = _CapturedStep(self._advance_captured)

    def run(self) -> None:
        """Samples every completion to its end."""
        try:
            self._run()
        finally:
            # Freed now: if Python's collector freed it during another capture, that would fail.
            self._graph = None

    def _run(self) -> None:
        between_looks = TOKENS_BETWEEN_LOOKS if self._drawn.is_cuda else 1
        self._draw(self._logits)
        for step in range(1, self._max_tokens):
            if step % between_looks == 0 and not self._keep_open_rows():
                break
            self._advance(step)

    def _advance(self, step: int) -> None:
        """Draws token number `step` of each row."""
        seen = self._prompt_width + step
        if self._graph is None:
            mask = self._mask[..., :seen]
            positions = self._positions + (step - 1)
            self._read_drawn(positions, mask)
        else:
            shown = min(round_up(seen, CAPTURED_TOKENS), self._mask.shape[-1])
            self._graph.run(len(self._drawn), shown)

    def _advance_captured(self, shown: int) -> None:
        """Does `_advance` with the step counter on the device, so that a CUDA graph can repeat it.

        shown: The tokens of the cache to which attention attends.
        """
        place = self._prompt_width + self._step - 1
        for layer in self._cache.layers:
            layer.fix(place, shown)
        mask = self._mask[..., :shown] & (self._places[:shown] <= place)
        positions = self._positions + self._step - 1
        self._read_drawn(positions, mask)

    def _read_drawn(self, positions: Tensor, mask: Tensor) -> None:
        """Runs the model on the tokens that were drawn last, and draws the next ones."""
        logits = _forward(
            self._transformer, self._cache, self._drawn[:, None], positions, attention_mask=mask
        )
        if self._routing is not None:
            self._experts[self._request_of_row, self._step - 1] = self._routing.take_choices()
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        """Draws a token for each row and records it, all on the device."""
        requests = self._request_of_row
        step = self._step
        drawn, log_probabilities, entropies = draw_tokens(
            logits, self._uniforms[requests, step], self._sampling
        )
        is_open = self._is_open[requests]
        stops = is_open & torch.isin(drawn, self._stop_ids)
        ends = stops | (is_open & (self._limits[requests] == step + 1))
        self._tokens[requests, step] = drawn
        self._log_probabilities[requests, step] = log_probabilities
        self._entropies[requests, step] = torch.where(is_open, entropies, 0.0)
        self._lengths[requests] = torch.where(ends, step + 1, self._lengths[requests])
        self._is_stopped[requests] = self._is_stopped[requests] | stops
        self._is_open[requests] = is_open & ~ends
        self._drawn.copy_(drawn)
        self._step += 1

    def _keep_open_rows(self) -> bool:
        """Drops rows that have ended; returns whether any is left. Waits for the device.

        A captured step drops them once they are half of all: each number of rows is a new capture.
        """
        is_open = self._is_open[self._request_of_row]
        open_rows = is_open.nonzero().squeeze(1)
        count = len(open_rows)
        if count == 0:
            return False
        if count == len(is_open) or (self._graph is not None and count > len(is_open) // 2):
            return True
        # Of `count` rows, those that have ended are replaced by as many open ones behind them.
        kept = torch.arange(count, device=open_rows.device)
        kept[~is_open[:count]] = open_rows[open_rows >= count]
        self._request_of_row = self._request_of_row[kept]
        self._drawn = self._drawn[kept]
        self._mask = self._mask[kept]
        self._positions = self._positions[kept]
        self._cache.reorder_cache(kept)
        return True

    def list_sampled(self) -> list[Sampled]:
        """Lists the completions in the order of the requests."""
        by_request = zip(
            self._tokens.cpu(),
            self._log_probabilities.cpu(),
            self._entropies.sum(1).tolist(),
            self._lengths.tolist(),
            self._is_stopped.tolist(),
            self._list_experts(),
            strict=True,
        )
        return [
            Sampled(
                tokens[:length].tolist(),
                log_probabilities[:length].tolist(),
                entropy,
                Ended.STOPPED if is_stopped else Ended.CUT,
                experts=experts,
            )
            for tokens, log_probabilities, entropy, length, is_stopped, experts in by_request
        ]

    def _list_experts(self) -> Sequence[NDArray[np.int16] | None]:
        """Lists for each request the experts of its prompt and its completion.

        The model has not read a completion's last token, whose experts are -1.
        """
        lengths = self._lengths.tolist()
        if self._routing is None:
            return [None] * len(lengths)
        sampled = self._experts.cpu().numpy()
        listed = []
        for prompt, own, length in zip(self._experts_of_prompts, sampled, lengths, strict=True):
            own[length - 1] = -1
            listed.append(np.concatenate((prompt, own[:length])))
        return listed


class _CapturedStep:
    """A sampling step as a CUDA graph, captured again when the shape changes.

    A model whose forward waits for the device (a loop over experts) cannot be captured. It samples
    without a graph.
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._shape: tuple[int, int] | None = None  # (rows, tokens shown) of the last step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._can_capture = True

    def run(self, rows: int, shown: int) -> None:
        """Runs one step.

        The first step of each shape is not captured: libraries allocate and choose kernels in it.
        """
        if (rows, shown) != self._shape:
            self._shape = (rows, shown)
            self._graph = None
            self._advance(shown)
        elif self._graph is not None:
            self._graph.replay()
        elif self._can_capture and self._capture(shown):
            self.run(rows, shown)
        else:
            self._advance(shown)

    def _capture(self, shown: int) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread may use the device meanwhile to copy a checkpoint.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._advance(shown)
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"sampling is not captured as a CUDA graph: {on_one_line(error)}", flush=True)
            self._can_capture = False
            return False
        self._graph = graph
        return True


class _Prompt(NamedTuple):
    ids: tuple[int, ...]
    images: tuple[EncodedImage, ...]


class _PromptReader(NamedTuple):
    """The parts of the engine that read prompts into a cache."""

    transformer: Any
    images: ImageProcessor | None  # None where prompts have no images
    device: torch.device


class _Read(NamedTuple):
    """What is known of prompts that have been read into a cache."""

    logits: Tensor  # fp32[prompts, vocabulary]: of the token after the prompt
    sizes: Tensor  # int64[prompts]: the prompt's tokens in the cache, with the padding before it
    positions: Tensor  # int64[prompts, 1]: of the token after the prompt


class _ReadyRequests(NamedTuple):
    """Requests whose prompts have been read."""

    cache: DynamicCache  # each request's row ends with its prompt
    # int64[requests, tokens] or bool[requests, 1, 1, tokens]: of the prompts and the tokens that
    # will be sampled
    mask: Tensor
    positions: Tensor  # int64[requests, 1]: of the next token
    logits: Tensor  # fp32[requests, vocabulary]: of the next token
    ends: Tensor  # int64[requests, 1]: the prompt's end among all tokens that were read
    packs: bool  # whether the model computes attention by our code, with a bool mask


def _read_prompts(
    reader: _PromptReader, requests: Sequence[Request], max_tokens: int
) -> _ReadyRequests:
    """Reads each prompt once, and copies its cache to each request that has it.

    max_tokens: The tokens that will be sampled, for which the cache has room.
    """
    device = reader.device
    asked = [_Prompt(request.prompt_ids, request.images) for request in requests]
    prompts = sorted(dict.fromkeys(asked), key=lambda prompt: len(prompt.ids))
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    # int64[requests]: the index in `prompts` of each request's prompt
    of_request = torch.tensor([index_of[prompt] for prompt in asked], device=device)
    lengths = torch.tensor([[len(prompt.ids)] for prompt in prompts], device=device)
    longest = len(prompts[-1].ids)
    config = text_config_of(reader.transformer.config)
    cache_tokens = torch.arange(longest + max_tokens, device=device)
    mask = (cache_tokens >= longest - lengths)[of_request]  # every prompt ends at `longest`
    cache = make_cache(config, longest + max_tokens)
    is_plain = all(isinstance(layer, ReservedLayer) for layer in cache.layers)
    packs = is_plain and config._attn_implementation == PACKED
    if is_plain:
        parts, read = _read_in_parts(reader, prompts, packs)
        ends = read.sizes.cumsum(0)[:, None]
        # [prompts, longest]: where the tokens stand among all that were read. What is before a
        # prompt is masked, but must not be nan: its first token is there.
        places = (ends + torch.arange(-longest, 0, device=device)).maximum(ends - lengths)
        for layer in cache.layers:
            layer.fill([part.layers.pop(0) for part in parts], places[of_request])
    else:
        read = _read(reader, cache, prompts, packs)
        ends = read.sizes.cumsum(0)[:, None]
        cache.reorder_cache(of_request)
    return _ReadyRequests(
        cache,
        mask=mask[:, None, None] if packs else mask.long(),
        positions=read.positions[of_request],
        logits=read.logits[of_request],
        ends=ends[of_request],
        packs=packs,
    )


def _read_in_parts(
    reader: _PromptReader, prompts: Sequence[_Prompt], packs: bool
) -> tuple[list[DynamicCache], _Read]:
    """Reads PROMPTS_AT_ONCE prompts at a time; sorted prompts need little padding.

    Returns:
        (a cache for each part, what is known of all prompts).
    """
    config = text_config_of(reader.transformer.config)
    caches = []
    reads = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        cache = DynamicCache(config=config)
        reads.append(_read(reader, cache, prompts[start : start + PROMPTS_AT_ONCE], packs))
        caches.append(cache)
    return caches, _Read(*map(torch.cat, zip(*reads, strict=True)))


def _read(
    reader: _PromptReader, cache: DynamicCache, prompts: Sequence[_Prompt], packs: bool
) -> _Read:
    """Reads prompts into `cache`: all in one packed row, as training does.

    Prompts with images, and all prompts unless the model `packs`, get a padded row each.
    """
    if any(prompt.images for prompt in prompts) or not packs:
        return _read_padded(reader, cache, prompts)
    device = reader.device
    lengths = tuple(len(prompt.ids) for prompt in prompts)
    sizes = torch.tensor(lengths, device=device)
    ids = torch.tensor([list(chain.from_iterable(prompt.ids for prompt in prompts))], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    ends = sizes.cumsum(0)
    keys: Record = {
        # Our attention reads packed rows only so; the layers fill the cache nevertheless.
        "use_cache": False,
        "logits_to_keep": ends - 1,
        "packed_lengths": lengths,
        "cu_seq_lens": F.pad(ends, (1, 0)).int(),
        "max_document_length": max(lengths),
    }
    logits = _forward(reader.transformer, cache, ids, positions, **keys)
    return _Read(logits, sizes, sizes[:, None])


def _read_padded(reader: _PromptReader, cache: DynamicCache, prompts: Sequence[_Prompt]) -> _Read:
    """Reads prompts into `cache`: each in a row, with padding before it."""
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, longest - len(prompt.ids) :] = 1
    ids = ids.to(reader.device)
    mask = mask.to(reader.device)
    images = list(chain.from_iterable(prompt.images for prompt in prompts))
    inputs: Fields = {}
    if images:
        assert reader.images is not None
        inputs = reader.images.make_generation_inputs(reader.transformer, ids, images)
        positions, following = find_prompt_positions(reader.transformer, ids, mask, inputs)
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        following = mask.sum(1, keepdim=True)
    logits = _forward(reader.transformer, cache, ids, positions, attention_mask=mask, **inputs)
    return _Read(logits, torch.full((len(prompts),), longest, device=reader.device), following)


def _forward(
    transformer: Any, cache: DynamicCache, ids: Tensor, positions: Tensor, **keys: Any
) -> Tensor:
    """Runs the model on `ids` with a cache.

    Returns:
        fp32[rows, vocabulary], the logits of the token after each row; with `logits_to_keep` among
        `keys`, those of its places in the only row.
    """
    keys = {"use_cache": True, "logits_to_keep": 1} | keys
    keys[_name_of_cache(transformer.__class__)] = cache
    logits: Tensor = transformer(input_ids=ids, position_ids=positions, **keys).logits
    return logits.flatten(0, 1).float()


@functools.cache
def _name_of_cache(model_class: type) -> str:
    """The name of the cache among the forward's arguments, which differs between classes."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "cache" if "cache" in parameters else "past_key_values"


def draw_tokens(
    logits: Tensor, uniforms: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws the next token of each row by the inverse of the cumulative distribution, in fp64.

    The same uniform number gives the same token, unless rounding moves a border between two tokens
    across it.

    Args:
        logits: fp32[rows, vocabulary].
        uniforms: float64[rows], in [0, 1).
        sampling: Gives the temperature.

    Returns:
        (tokens, their log-probabilities, the entropies of the distributions), each [rows].
    """
    log_probabilities = torch.log_softmax(logits / sampling.temperature, -1)
    probabilities = log_probabilities.exp()
    if sampling.greedy:
        drawn = logits.argmax(-1)
    else:
        cumulative = probabilities.double().cumsum(-1)
        wanted = uniforms[:, None] * cumulative[:, -1:]
        drawn = (
            torch.searchsorted(cumulative, wanted, right=True)
            .squeeze(1)
            .clamp(max=logits.shape[1] - 1)
        )
    entropy = -(probabilities * log_probabilities.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    return drawn, log_probabilities.gather(1, drawn[:, None]).squeeze(1), entropy
