"""The embedded engine: the model in training itself samples, where it is, with a key-value cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from finetune.config.pretrained import text_config_of
from finetune.constants import PROMPTS_AT_ONCE
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import keep_gathered
from finetune.distributed.world import World
from finetune.models.attention import NAME as PACKED
from finetune.rollout.engine import Ended, Request, Sampled, Sampling


class ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """The keys and values of a layer, in memory reserved once: transformers' own copies them for each token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._reserved: tuple[Tensor, ...] = ()  # keys and values, [rows, heads, tokens, head size]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns the keys and values of all so far."""
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            (rows, heads), size = key_states.shape[:2], key_states.shape[3]
            # The keys' tokens lie side by side in memory: the product with one query reads them faster.
            keys = key_states.new_empty(rows, heads, size, self._tokens).transpose(2, 3)
            self._reserved = keys, value_states.new_empty(rows, heads, self._tokens, value_states.shape[3])
        end = first + key_states.shape[2]
        for reserved, states in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[:, :, first:end] = states
        self._show(end)
        return (self.keys, self.values) if first else (key_states, value_states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows `beam_idx`, in that order. Only those that move are copied, unless they become more."""
        rows, length = len(beam_idx), self.get_seq_length()
        if rows > len(self.keys):
            self._reserved = tuple(reserved[beam_idx] for reserved in self._reserved)
        else:
            moved = (beam_idx != torch.arange(rows, device=beam_idx.device)).nonzero().squeeze(1)
            for reserved in self._reserved:
                reserved[moved] = reserved[beam_idx[moved]]
            self._reserved = tuple(reserved[:rows] for reserved in self._reserved)
        self._show(length)

    def fill(self, parts: Sequence[DynamicLayer], places: Tensor) -> None:
        """Takes the tokens `places` (int64[rows, tokens]) of `parts`, counted through all of their rows."""
        keys, values = (
            torch.cat([states.transpose(0, 1).flatten(1, 2) for states in each], 1)[:, places].transpose(0, 1)
            for each in ([part.keys for part in parts], [part.values for part in parts])
        )
        self.update(keys, values)

    def _show(self, length: int) -> None:
        self.keys, self.values = (reserved[:, :, :length] for reserved in self._reserved)


def make_cache(config: Any, tokens: int) -> DynamicCache:
    """A model's cache for rows of up to `tokens` tokens; layers with a window or a state stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [ReservedLayer(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class EmbeddedEngine:
    """Samples `rows` completions at once; the next begin when these have ended.

    A prompt is read once for all of its completions. A completion that has ended leaves the batch.
    """

    def __init__(self, model: nn.Module, world: World, stop_ids: Sequence[int], rows: int) -> None:
        self._model, self._world, self._rows = model, world, rows
        self._stop_ids = torch.tensor(sorted(stop_ids), device=world.device)

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """A completion of each request. All ranks call it: together they gather the model, and free it at the end."""
        was_training = self._model.training
        self._model.eval()
        # Generation's shapes and caches would fill torch.compile's limit of graphs, and training would run uncompiled.
        with keep_gathered(self._model), torch.compiler.set_stance("force_eager"):
            waves = (requests[start : start + self._rows] for start in range(0, len(requests), self._rows))
            sampled = [each for wave in waves for each in self._sample_together(wave, sampling)]
        self._model.train(was_training)
        return sampled

    def forget(self) -> None:
        """Nothing: what is sampled follows from the weights."""

    def _sample_together(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        transformer: Any = unwrap(self._model)
        device, most_of = self._world.device, [sampling.limit(request) for request in requests]
        most, limits = max(most_of), torch.tensor(most_of, device=device)
        cache, mask, positions, logits = _read_prompts(transformer, requests, most, device)
        longest = mask.shape[-1] - most
        uniforms = torch.from_numpy(np.stack([request.draw_uniforms(most) for request in requests])).to(device)
        tokens = torch.zeros(len(requests), most, dtype=torch.int64, device=device)
        found = torch.zeros(2, len(requests), most, device=device)  # log-probabilities, entropies
        lengths, stopped = torch.tensor(most_of), torch.zeros(len(requests), dtype=torch.bool)
        alive = torch.arange(len(requests), device=device)
        for step in range(most):
            drawn, *measured = draw_tokens(logits, uniforms[alive, step], sampling)
            tokens[alive, step], found[:, alive, step] = drawn, torch.stack(measured)
            stops = torch.isin(drawn, self._stop_ids)
            ends = stops | (limits[alive] == step + 1)
            if ends.any():
                ended = alive[stops].cpu()
                lengths[ended], stopped[ended] = step + 1, True
                going = (~ends).nonzero().squeeze(1)
                if not len(going):
                    break
                kept = torch.arange(len(going), device=device)  # the last rows move to where others have ended
                kept[ends[: len(going)]] = going[going >= len(going)]
                alive, drawn, mask, positions = (each[kept] for each in (alive, drawn, mask, positions))
                cache.reorder_cache(kept)
            if step + 1 < most:
                seen = mask[..., : longest + step + 1]
                logits = _forward(transformer, cache, drawn[:, None], positions + step, attention_mask=seen)
        on_host = zip(tokens.cpu(), found[0].cpu(), found[1].sum(1).tolist(), lengths.tolist(), stopped, strict=True)
        return [
            Sampled(ids[:n].tolist(), logs[:n].tolist(), entropy, Ended.STOPPED if stop else Ended.CUT)
            for ids, logs, entropy, n, stop in on_host
        ]


def _read_prompts(
    transformer: Any, requests: Sequence[Request], most: int, device: torch.device
) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
    """Reads each prompt once, and gives each request a row of the cache that ends with the last token of its prompt.

    Returns:
        The cache; the attention mask of the prompts and `most` more tokens, int64[requests, tokens] or
        bool[requests, 1, 1, tokens]; the position of each next token, int64[requests, 1]; the logits after each prompt.
    """
    prompts = sorted(dict.fromkeys(request.prompt_ids for request in requests), key=len)
    number = {prompt: index for index, prompt in enumerate(prompts)}
    of_request = torch.tensor([number[request.prompt_ids] for request in requests], device=device)
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    longest, config = len(prompts[-1]), text_config_of(transformer.config)
    mask = (torch.arange(longest + most, device=device) >= longest - lengths)[of_request]
    cache = make_cache(config, longest + most)
    is_plain = all(isinstance(layer, ReservedLayer) for layer in cache.layers)
    packs = is_plain and config._attn_implementation == PACKED
    if is_plain:  # some at once, of similar length
        some = [prompts[start : start + PROMPTS_AT_ONCE] for start in range(0, len(prompts), PROMPTS_AT_ONCE)]
        parts = [DynamicCache(config=config) for _ in some]
        read = [_read(transformer, *each, device, packs) for each in zip(parts, some, strict=True)]
        logits = torch.cat([found for found, _ in read])
        ends = torch.cat([sizes for _, sizes in read]).cumsum(0)[:, None]
        # What is before a prompt is masked, but it must not be nan: its first token stands there.
        tokens = (ends + torch.arange(-longest, 0, device=device)).maximum(ends - lengths)
        for layer in cache.layers:
            layer.fill([part.layers.pop(0) for part in parts], tokens[of_request])
    else:
        logits, _ = _read(transformer, cache, prompts, device, packs)
        cache.reorder_cache(of_request)
    return cache, mask[:, None, None] if packs else mask.long(), lengths[of_request], logits[of_request]


def _read(
    transformer: Any, cache: DynamicCache, prompts: Sequence[Sequence[int]], device: torch.device, packs: bool
) -> tuple[Tensor, Tensor]:
    """Reads prompts into `cache`: all in one packed row, as training reads them, or each in a padded one.

    Returns:
        The logits after each; int64[prompts]: the tokens that each has in the cache, padding before it included.
    """
    lengths = tuple(map(len, prompts))
    sizes = torch.tensor(lengths if packs else [max(lengths)] * len(lengths), device=device)
    if packs:
        ids = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        ends = sizes.cumsum(0)
        keys: dict[str, Any] = {"use_cache": False, "logits_to_keep": ends - 1, "packed_lengths": lengths}
        keys |= {"cu_seq_lens": F.pad(ends, (1, 0)).int(), "max_document_length": max(lengths)}
    else:
        ids, mask = (
            torch.tensor([[0] * (max(lengths) - len(row)) + list(row) for row in rows], device=device)
            for rows in (prompts, [[1] * length for length in lengths])
        )
        positions, keys = (mask.cumsum(1) - 1).clamp(min=0), {"attention_mask": mask}
    return _forward(transformer, cache, ids, positions, **keys), sizes


def _forward(transformer: Any, cache: DynamicCache, ids: Tensor, positions: Tensor, **keys: Any) -> Tensor:
    """fp32[rows, vocabulary]: the logits after the last token of each row, or those of one row to keep."""
    keys = {"use_cache": True, "logits_to_keep": 1} | keys
    logits: Tensor = transformer(input_ids=ids, position_ids=positions, past_key_values=cache, **keys).logits
    return logits.flatten(0, 1).float()


def draw_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each row, its log-probability and the entropy of what it was drawn from.

    Drawn by the inverse of the cumulative distribution, in fp64: the same number gives the same token, unless rounding
    has moved a border between two tokens over it.

    Args:
        logits: fp32[rows, vocabulary].
        uniforms: float64[rows], in [0, 1).
        sampling: With its temperature.
    """
    log_probabilities = torch.log_softmax(logits / sampling.temperature, -1)
    probabilities = log_probabilities.exp()
    if sampling.greedy:
        drawn = logits.argmax(-1)
    else:
        cumulative = probabilities.double().cumsum(-1)
        wanted = uniforms[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, wanted, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    entropy = -(probabilities * log_probabilities.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    return drawn, log_probabilities.gather(1, drawn[:, None]).squeeze(1), entropy
