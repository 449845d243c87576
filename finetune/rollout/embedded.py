"""The embedded engine: samples completions from the model in training, on its own ranks, with a
key-value cache.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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
from finetune.constants import PROMPTS_AT_ONCE, round_up
from finetune.data.images import EncodedImage, ImageProcessor
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import keep_gathered
from finetune.distributed.world import World
from finetune.errors import on_one_line
from finetune.models.attention import NAME as PACKED
from finetune.models.routing import Routing
from finetune.models.vision import find_prompt_positions
from finetune.rollout.engine import Ended, Request, Sampled, Sampling

# How many tokens a GPU samples before the host looks which rows have ended; each look waits for the
# GPU. Until then rows that have ended are sampled too, and their surplus tokens are dropped.
TOKENS_BETWEEN_LOOKS = 16
# A captured step attends to a multiple of this number of cached tokens. It is captured again for
# the next multiple.
CAPTURED_TOKENS = 256


class ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """The cached keys and values of a layer, in memory that is reserved once.

    transformers' own class copies all of them for each new token. `keys` and `values` are views of
    the tokens that attention sees.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens  # that fit into the reserved memory
        self._reserved: tuple[Tensor, ...] = ()  # keys and values, [rows, heads, tokens, head size]
        self._fixed_place: Tensor | None = None  # see `fix`

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of tokens; returns those that attention sees.

        That is all tokens so far; in a captured step, which writes one token at a place that is
        read on the device, the number of tokens that `fix` has set.
        """
        states = key_states, value_states
        if self._fixed_place is None:
            return self._append(*states)
        for reserved, state in zip(self._reserved, states, strict=True):
            reserved.index_copy_(2, self._fixed_place, state)
        return self.keys, self.values

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens behind those so far; returns the keys and values of all."""
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._reserve(key_states, value_states)
        end = first + key_states.shape[2]
        for reserved, states in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[:, :, first:end] = states
        self._set_visible(end)
        if first == 0:
            return (key_states, value_states)  # the same numbers as the views, but contiguous
        return (self.keys, self.values)

    def _reserve(self, key_states: Tensor, value_states: Tensor) -> None:
        """Reserves memory for `_tokens` tokens in the dtype and on the device of the states."""
        rows, heads, _, size = key_states.shape
        values = value_states.new_empty(rows, heads, self._tokens, value_states.shape[3])
        if key_states.is_cuda:
            # Zeros, because a captured step reads masked places too, and they must not be nan.
            keys = key_states.new_zeros(rows, heads, self._tokens, size)
            self._reserved = keys, values.zero_()
        else:
            # The tokens are adjacent in memory, because the product with one query then reads the
            # keys faster.
            keys = key_states.new_empty(rows, heads, size, self._tokens).transpose(2, 3)
            self._reserved = keys, values

    def fix(self, place: Tensor, visible: int) -> None:
        """Makes `update` write one token at `place`, and return the first `visible` tokens.

        A captured step can then be replayed: the place is read on the device, and shapes stay.

        place: int64[1], on the device.
        """
        self._fixed_place = place
        self._set_visible(visible)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows of indexes `beam_idx` (transformers' name), in that order.

        It copies only rows that move, within the reserved memory. If the number of rows grows, it
        copies all into new memory.
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
        self._set_visible(length)

    def fill(self, parts: Sequence[DynamicLayer], places: Tensor) -> None:
        """Fills the cache with tokens from the caches of prompts.

        Args:
            parts: The same layer in the cache of each batch of prompts.
            places: int64[rows, tokens]: the place of each token to copy among the tokens of all
                rows of all `parts`.
        """
        keys = _pick_tokens([part.keys for part in parts], places)
        values = _pick_tokens([part.values for part in parts], places)
        self.update(keys, values)

    def _set_visible(self, tokens: int) -> None:
        """Makes `keys` and `values` views of the first `tokens` tokens."""
        self.keys, self.values = (reserved[:, :, :tokens] for reserved in self._reserved)


def _pick_tokens(states: Sequence[Tensor], places: Tensor) -> Tensor:
    """Picks the keys or values of tokens by their places among the tokens of all rows.

    Args:
        states: Keys or values of several caches, each [rows, heads, tokens, head size].
        places: int64[new rows, new tokens].

    Returns:
        [new rows, heads, new tokens, head size].
    """
    tokens = torch.cat([each.transpose(0, 1).flatten(1, 2) for each in states], 1)
    return tokens[:, places].transpose(0, 1)


def make_cache(config: Any, tokens: int) -> DynamicCache:
    """Makes a cache for rows of up to `tokens` tokens.

    Layers with a sliding window or a recurrent state get transformers' own class.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        ReservedLayer(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class EmbeddedEngine:
    """Samples completions from the model in training, `rows` at once.

    Each prompt is read once for all of its completions among them. A completion that has ended
    leaves the batch.
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
        """Makes an engine of `model`.

        Args:
            model: The model in training, in any layout.
            world: The ranks.
            stop_ids: Token ids that end a completion.
            rows: The number of completions that are sampled at once.
            images: The processor of the prompts' images; None: prompts have no images.
            routing: Records the experts of each token; None: training does not replay experts.
        """
        self._model = model
        self._images = images
        self._routing = routing
        self._world = world
        self._rows = rows
        self._stop_ids = torch.tensor(sorted(stop_ids), device=world.device)

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Samples a completion for each request, in order.

        All ranks call it, because they gather the weights together, and free them at the end.
        """
        was_training = self._model.training
        self._model.eval()
        recording = nullcontext() if self._routing is None else self._routing.recording()
        # Eager, because sampling has many shapes: they would use up torch.compile's limit of
        # graphs, and training would then run uncompiled.
        with keep_gathered(self._model), torch.compiler.set_stance("force_eager"), recording:
            sampled: list[Sampled] = []
            for start in range(0, len(requests), self._rows):
                sampled += self._sample_together(requests[start : start + self._rows], sampling)
        self._model.train(was_training)
        return sampled

    def _sample_together(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Samples completions of at most `rows` requests in one batch."""
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
    """Returns whether a sampling step may be captured as a CUDA graph.

    That needs a GPU that samples a token without communicating with other ranks.
    """
    return world.device.type == "cuda" and not world.sharding.divides_matrices and world.stages == 1


class _Wave:
    """Completions that are sampled together. Each step draws one token for each of them.

    A step reads and writes only tensors on the device. On a GPU it is captured as a CUDA graph and
    replayed, because its kernels are so short that the host would take twice as long to launch
    them.
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
        self._max_tokens = max(limits)  # of the longest completion
        ready = _read_prompts(reader, requests, self._max_tokens)
        self._cache = ready.cache
        self._mask = ready.mask
        self._positions = ready.positions
        self._logits = ready.logits
        self._routing = routing
        if routing is not None:
            self._record_experts_of_prompts(routing, requests, ready.prompt_ends)
        self._prompt_width = self._mask.shape[-1] - self._max_tokens  # tokens of a padded prompt
        self._places = torch.arange(self._mask.shape[-1], device=device)  # of the cached tokens
        # Tensors of all requests, also of those whose rows have left the batch: [requests, ...].
        self._limits = torch.tensor(limits, device=device)
        uniforms = np.stack([request.draw_uniforms(self._max_tokens) for request in requests])
        self._uniforms = torch.from_numpy(uniforms).to(device)
        self._tokens = torch.zeros(count, self._max_tokens, dtype=torch.int64, device=device)
        self._log_probabilities = torch.zeros(count, self._max_tokens, device=device)
        self._entropies = torch.zeros(count, self._max_tokens, device=device)
        self._lengths = self._limits.clone()  # of completions; one that stops before is shorter
        self._is_open = torch.ones(count, dtype=torch.bool, device=device)
        self._is_stopped = torch.zeros(count, dtype=torch.bool, device=device)
        # Tensors of the rows that are still in the batch: [rows]. Cache, mask and positions have
        # the same rows.
        self._request_of_row = torch.arange(count, device=device)
        self._drawn = torch.zeros(count, dtype=torch.int64, device=device)  # the latest tokens
        self._step = torch.zeros(1, dtype=torch.int64, device=device)  # tokens drawn so far
        self._graph: _CapturedStep | None = None
        if can_capture and ready.has_bool_mask:  # a captured step cannot make another mask
            self._graph = _CapturedStep(self._advance_captured)

    def _record_experts_of_prompts(
        self, routing: Routing, requests: Sequence[Request], prompt_ends: Tensor
    ) -> None:
        """Keeps the experts of each request's prompt, and makes room for those of its completion.

        prompt_ends: int64[requests, 1]: where each prompt ends among all tokens that were read.
        """
        choices = routing.take_choices()  # [tokens of all prompts as read, layers, chosen]
        self._experts_of_prompts = []
        for end, request in zip(prompt_ends.flatten().tolist(), requests, strict=True):
            start = end - len(request.prompt_ids)
            self._experts_of_prompts.append(choices[start:end].cpu().numpy())
        # [requests, tokens, layers, chosen]: the experts of each sampled token
        shape = (len(requests), self._max_tokens, *choices.shape[1:])
        self._experts = choices.new_full(shape, -1)

    def run(self) -> None:
        """Samples every completion to its end."""
        try:
            self._run()
        finally:
            # The graph is freed here, because if Python's collector freed it during a later
            # capture, that capture would fail.
            self._graph = None

    def _run(self) -> None:
        """Draws tokens until every completion has ended."""
        between_looks = TOKENS_BETWEEN_LOOKS if self._drawn.is_cuda else 1
        self._draw(self._logits)
        del self._logits  # each step has logits of the same size
        for step in range(1, self._max_tokens):
            if step % between_looks == 0 and not self._keep_open_rows():
                break
            self._advance(step)

    def _advance(self, step: int) -> None:
        """Draws token number `step` (0-based, at least 1) of each row."""
        cached = self._prompt_width + step  # tokens in the cache once the last one has been read
        if self._graph is None:
            mask = self._mask[..., :cached]
            positions = self._positions + (step - 1)
            self._read_drawn(positions, mask)
        else:
            visible = min(round_up(cached, CAPTURED_TOKENS), self._mask.shape[-1])
            self._graph.run(len(self._drawn), visible)

    def _advance_captured(self, visible: int) -> None:
        """Does what `_advance` does, by the step counter on the device, so that a CUDA graph can
        repeat it.

        visible: The number of cached tokens that attention sees; those not yet written are masked.
        """
        place = self._prompt_width + self._step - 1
        for layer in self._cache.layers:
            layer.fix(place, visible)
        mask = self._mask[..., :visible] & (self._places[:visible] <= place)
        positions = self._positions + self._step - 1
        self._read_drawn(positions, mask)

    def _read_drawn(self, positions: Tensor, mask: Tensor) -> None:
        """Runs the model on the latest token of each row, and draws the next one."""
        logits = _forward(
            self._transformer, self._cache, self._drawn[:, None], positions, attention_mask=mask
        )
        if self._routing is not None:
            self._experts[self._request_of_row, self._step - 1] = self._routing.take_choices()
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        """Draws a token for each row and records it, all on the device.

        logits: fp32[rows, vocabulary].
        """
        requests = self._request_of_row
        step = self._step
        drawn, log_probabilities, entropies = draw_tokens(
            logits, self._uniforms[requests, step], self._sampling
        )
        is_open = self._is_open[requests]
        stops = is_open & torch.isin(drawn, self._stop_ids)
        reaches_limit = is_open & (self._limits[requests] == step + 1)
        has_ended = stops | reaches_limit
        self._tokens[requests, step] = drawn
        self._log_probabilities[requests, step] = log_probabilities
        self._entropies[requests, step] = torch.where(is_open, entropies, 0.0)
        self._lengths[requests] = torch.where(has_ended, step + 1, self._lengths[requests])
        self._is_stopped[requests] = self._is_stopped[requests] | stops
        self._is_open[requests] = is_open & ~has_ended
        self._drawn.copy_(drawn)
        self._step += 1

    def _keep_open_rows(self) -> bool:
        """Drops rows that have ended; returns whether any row is left. Waits for the device.

        With captured steps it waits until half of the rows have ended, because every number of rows
        needs a new capture.
        """
        is_open = self._is_open[self._request_of_row]
        open_rows = is_open.nonzero().squeeze(1)
        count = len(open_rows)
        if count == 0:
            return False
        if count == len(is_open):
            return True
        if self._graph is not None and count > len(is_open) // 2:
            return True
        # The first `count` rows stay where they are, so that the cache copies little. Open rows
        # behind them take the places of those that have ended.
        kept = torch.arange(count, device=open_rows.device)
        kept[~is_open[:count]] = open_rows[open_rows >= count]
        self._request_of_row = self._request_of_row[kept]
        self._drawn = self._drawn[kept]
        self._mask = self._mask[kept]
        self._positions = self._positions[kept]
        self._cache.reorder_cache(kept)
        return True

    def list_sampled(self) -> list[Sampled]:
        """Makes the completions, in the order of the requests."""
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

        They are int16[tokens, layers, chosen], with -1 for the completion's last token, which the
        model has not read; None if no routing is recorded.
        """
        lengths = self._lengths.tolist()
        if self._routing is None:
            return [None] * len(lengths)
        experts_of_completions = self._experts.cpu().numpy()
        experts = []
        for prompt, completion, length in zip(
            self._experts_of_prompts, experts_of_completions, lengths, strict=True
        ):
            completion[length - 1] = -1
            experts.append(np.concatenate((prompt, completion[:length])))
        return experts


class _CapturedStep:
    """A sampling step as a CUDA graph, which is captured again when the shape changes.

    If the model's forward waits for the device, as a loop over experts does, the capture fails, and
    steps run without a graph.
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._shape: tuple[int, int] | None = None  # (rows, visible tokens) of the last step
        self._graph: torch.cuda.CUDAGraph | None = None  # of a step of `_shape`
        self._can_capture = True

    def run(self, rows: int, visible: int) -> None:
        """Runs one step for `rows` rows, in which attention sees `visible` cached tokens.

        The first step of each shape runs without a graph, because libraries allocate memory and
        choose kernels in it. The second is captured; capturing does not run it.
        """
        if (rows, visible) != self._shape:
            self._shape = (rows, visible)
            self._graph = None
            self._advance(visible)
        elif self._graph is not None:
            self._graph.replay()
        elif self._can_capture and self._capture(visible):
            self.run(rows, visible)
        else:
            self._advance(visible)

    def _capture(self, visible: int) -> bool:
        """Captures a step without running it; returns whether that succeeded."""
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local", because another thread may use the device to copy a checkpoint.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._advance(visible)
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"sampling is not captured as a CUDA graph: {on_one_line(error)}", flush=True)
            self._can_capture = False
            return False
        self._graph = graph
        return True


class _Prompt(NamedTuple):
    """A prompt, as a key: requests with equal prompts share a cache row while prompts are read."""

    ids: tuple[int, ...]
    images: tuple[EncodedImage, ...]


class _PromptReader(NamedTuple):
    """What is needed to read prompts into a cache."""

    transformer: Any
    images: ImageProcessor | None  # None: prompts have no images
    device: torch.device


class _ReadPrompts(NamedTuple):
    """The results of reading prompts into a cache, besides the cache."""

    logits: Tensor  # fp32[prompts, vocabulary]: of the token after the prompt
    sizes: Tensor  # int64[prompts]: cached tokens of the prompt and the padding before it
    positions: Tensor  # int64[prompts, 1]: of the token after the prompt


class _ReadyRequests(NamedTuple):
    """Requests whose prompts have been read, so that their first token can be drawn."""

    cache: DynamicCache  # a row for each request, padded on the left
    # int64[requests, tokens] or bool[requests, 1, 1, tokens]: 0 for padding, 1 for tokens of the
    # prompt and those that will be sampled
    mask: Tensor
    positions: Tensor  # int64[requests, 1]: of the first token to sample
    logits: Tensor  # fp32[requests, vocabulary]: of the first token to sample
    prompt_ends: Tensor  # int64[requests, 1]: where the prompt ends among all tokens that were read
    has_bool_mask: bool  # whether the model uses our attention, which takes one


def _read_prompts(
    reader: _PromptReader, requests: Sequence[Request], max_tokens: int
) -> _ReadyRequests:
    """Reads each distinct prompt once, and copies its cache to every request that has it.

    max_tokens: The number of tokens that will be sampled, for which the cache has room.
    """
    device = reader.device
    prompt_of_request = [_Prompt(request.prompt_ids, request.images) for request in requests]
    prompts = sorted(dict.fromkeys(prompt_of_request), key=lambda prompt: len(prompt.ids))
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    # int64[requests]: the index in `prompts` of each request's prompt
    of_request = torch.tensor([index_of[prompt] for prompt in prompt_of_request], device=device)
    lengths = torch.tensor([[len(prompt.ids)] for prompt in prompts], device=device)
    longest = len(prompts[-1].ids)
    config = text_config_of(reader.transformer.config)
    cache_tokens = torch.arange(longest + max_tokens, device=device)
    # Every prompt ends at `longest`; padding lies before it, and sampled tokens follow.
    mask = (cache_tokens >= longest - lengths)[of_request]
    cache = make_cache(config, longest + max_tokens)
    is_plain = all(isinstance(layer, ReservedLayer) for layer in cache.layers)
    uses_packed_attention = is_plain and config._attn_implementation == PACKED
    if is_plain:
        batch_caches, read = _read_in_batches(reader, prompts, uses_packed_attention)
        ends = read.sizes.cumsum(0)[:, None]
        # [prompts, longest]: each token's place among all tokens that were read. Padding is masked,
        # but must not be nan, so the prompt's first token stands there.
        places = (ends + torch.arange(-longest, 0, device=device)).maximum(ends - lengths)
        for layer in cache.layers:
            # `pop` frees each layer of the batches as soon as it has been copied.
            layer.fill([batch.layers.pop(0) for batch in batch_caches], places[of_request])
    else:
        read = _read_batch(reader, cache, prompts, uses_packed_attention)
        ends = read.sizes.cumsum(0)[:, None]
        cache.reorder_cache(of_request)
    return _ReadyRequests(
        cache,
        mask=mask[:, None, None] if uses_packed_attention else mask.long(),
        positions=read.positions[of_request],
        logits=read.logits[of_request],
        prompt_ends=ends[of_request],
        has_bool_mask=uses_packed_attention,
    )


def _read_in_batches(
    reader: _PromptReader, prompts: Sequence[_Prompt], uses_packed_attention: bool
) -> tuple[list[DynamicCache], _ReadPrompts]:
    """Reads PROMPTS_AT_ONCE prompts at a time.

    prompts: Sorted by length, so that padded batches need little padding.

    Returns:
        (a cache for each batch, the results of all prompts).
    """
    config = text_config_of(reader.transformer.config)
    caches = []
    results = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        cache = DynamicCache(config=config)
        batch = prompts[start : start + PROMPTS_AT_ONCE]
        results.append(_read_batch(reader, cache, batch, uses_packed_attention))
        caches.append(cache)
    return caches, _ReadPrompts(*map(torch.cat, zip(*results, strict=True)))


def _read_batch(
    reader: _PromptReader,
    cache: DynamicCache,
    prompts: Sequence[_Prompt],
    uses_packed_attention: bool,
) -> _ReadPrompts:
    """Reads prompts into `cache`: all in one packed row, as training does, or each in a padded row.

    Rows are padded if a prompt has images, or the model does not use our attention for packed rows.
    """
    if any(prompt.images for prompt in prompts) or not uses_packed_attention:
        return _read_padded(reader, cache, prompts)
    device = reader.device
    lengths = tuple(len(prompt.ids) for prompt in prompts)
    sizes = torch.tensor(lengths, device=device)
    ids = torch.tensor([list(chain.from_iterable(prompt.ids for prompt in prompts))], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    ends = sizes.cumsum(0)
    keys: dict[str, Any] = {
        # With "use_cache" our attention would not read a packed row. The layers fill the cache
        # that they are given nevertheless.
        "use_cache": False,
        "logits_to_keep": ends - 1,
        "packed_lengths": lengths,
        "cu_seq_lens": F.pad(ends, (1, 0)).int(),
        "max_document_length": max(lengths),
    }
    logits = _forward(reader.transformer, cache, ids, positions, **keys)
    return _ReadPrompts(logits, sizes, positions=sizes[:, None])


def _read_padded(
    reader: _PromptReader, cache: DynamicCache, prompts: Sequence[_Prompt]
) -> _ReadPrompts:
    """Reads prompts into `cache`, each in a row, with padding before it."""
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, longest - len(prompt.ids) :] = 1
    ids = ids.to(reader.device)
    mask = mask.to(reader.device)
    images = list(chain.from_iterable(prompt.images for prompt in prompts))
    inputs: Mapping[str, Any] = {}
    if images:
        assert reader.images is not None
        inputs = reader.images.make_generation_inputs(reader.transformer, ids, images)
        positions, next_positions = find_prompt_positions(reader.transformer, ids, mask, inputs)
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # 0 in the padding
        next_positions = mask.sum(1, keepdim=True)
    logits = _forward(reader.transformer, cache, ids, positions, attention_mask=mask, **inputs)
    sizes = torch.full((len(prompts),), longest, device=reader.device)
    return _ReadPrompts(logits, sizes, next_positions)


def _forward(
    transformer: Any, cache: DynamicCache, ids: Tensor, positions: Tensor, **keys: Any
) -> Tensor:
    """Runs the model on `ids`, int64[rows, tokens], and adds their keys and values to `cache`.

    Returns:
        fp32[rows, vocabulary]: the logits of the token after each row. If `keys` have
        `logits_to_keep`, there is one row, and these are the logits at those places of it.
    """
    keys = {"use_cache": True, "logits_to_keep": 1} | keys
    keys[_name_of_cache(transformer.__class__)] = cache
    logits: Tensor = transformer(input_ids=ids, position_ids=positions, **keys).logits
    return logits.flatten(0, 1).float()


@functools.cache
def _name_of_cache(model_class: type) -> str:
    """Returns the name that the forward of `model_class` gives to its argument for the cache."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "cache" if "cache" in parameters else "past_key_values"


def draw_tokens(
    logits: Tensor, uniforms: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws the next token of each row by inverting the cumulative distribution, in fp64.

    The same uniform number gives the same token even if logits are rounded differently, unless
    rounding moves the border between two tokens across the number.

    Args:
        logits: fp32[rows, vocabulary].
        uniforms: fp64[rows], in [0, 1).
        sampling: The temperature, and whether the likeliest token is taken.

    Returns:
        (int64 tokens, their fp32 log-probabilities, the fp32 entropies of the distributions in
        nats), each [rows].
    """
    log_probabilities = torch.log_softmax(logits / sampling.temperature, -1)
    probabilities = log_probabilities.exp()
    if sampling.greedy:
        drawn = logits.argmax(-1)
    else:
        cumulative = probabilities.double().cumsum(-1)
        totals = cumulative[:, -1:]  # 1 up to rounding
        targets = uniforms[:, None] * totals
        drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
        drawn = drawn.clamp(max=logits.shape[1] - 1)  # rounding may lead behind the last token
    # 0 times -inf would be nan.
    finite = log_probabilities.clamp(min=torch.finfo(torch.float32).min)
    entropies = -(probabilities * finite).sum(-1)
    return drawn, log_probabilities.gather(1, drawn[:, None]).squeeze(1), entropies
