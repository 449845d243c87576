"""The embedded engine: the model in training itself samples, where it is, with a key-value cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from finetune.constants import PROMPTS_AT_ONCE
from finetune.distributed.parallelize import keep_gathered, unwrap
from finetune.distributed.world import World
from finetune.pretrained_config import text_config_of
from finetune.rollout.engine import Ended, Request, Sampled, Sampling


class ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """The keys and values of a layer, in memory reserved once: transformers' own copies them for each token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._reserved: list[Tensor] = []  # of keys and values, [rows, heads, tokens, head size]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns the keys and values of all so far."""
        first = self.get_seq_length()
        end = first + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._reserved = [self._reserve(states, states.shape[0]) for states in (key_states, value_states)]
        for reserved, states in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[:, :, first:end] = states
        self.keys, self.values = (reserved[:, :, :end] for reserved in self._reserved)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows `beam_idx`, in that order; one may come more than once."""
        length = self.get_seq_length()
        kept = [self._reserve(reserved, len(beam_idx)) for reserved in self._reserved]
        for new, reserved in zip(kept, self._reserved, strict=True):
            new[:, :, :length] = reserved[beam_idx, :, :length]
        self._reserved = kept
        self.keys, self.values = (reserved[:, :, :length] for reserved in kept)

    def fill(self, parts: Sequence["ReservedLayer"], rows: Tensor, length: int) -> None:
        """Takes `rows` of `parts`, whose rows are counted through; all end at `length` tokens."""
        first = parts[0]
        self.lazy_initialization(first.keys, first.values)
        self._reserved = [self._reserve(like, len(rows)) for like in (first.keys, first.values)]
        before = 0
        for part in parts:
            count, tokens = part.keys.shape[0], part.keys.shape[2]
            of_part = ((rows >= before) & (rows < before + count)).nonzero().squeeze(1)
            for reserved, states in zip(self._reserved, (part.keys, part.values), strict=True):
                reserved[of_part, :, : length - tokens] = 0  # masked, but not if it were nan
                reserved[of_part, :, length - tokens : length] = states[rows[of_part] - before]
            before += count
        self.keys, self.values = (reserved[:, :, :length] for reserved in self._reserved)

    def _reserve(self, like: Tensor, rows: int) -> Tensor:
        return like.new_empty(rows, like.shape[1], self._tokens, like.shape[3])


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
        device, most = self._world.device, sampling.max_tokens
        longest = max(len(request.prompt_ids) for request in requests)
        cache = make_cache(text_config_of(transformer.config), longest + most)
        mask, logits = self._read_prompts(transformer, cache, requests)
        uniforms = torch.from_numpy(np.stack([request.draw_uniforms(most) for request in requests])).to(device)
        tokens = torch.zeros(len(requests), most, dtype=torch.int64, device=device)
        found = torch.zeros(2, len(requests), most, device=device)  # log-probabilities, entropies
        lengths = torch.full((len(requests),), most)
        stopped = torch.zeros(len(requests), dtype=torch.bool)
        alive = torch.arange(len(requests), device=device)
        for step in range(most):
            drawn, *measured = draw_tokens(logits, uniforms[alive, step], sampling)
            tokens[alive, step], found[:, alive, step] = drawn, torch.stack(measured)
            ends = torch.isin(drawn, self._stop_ids)
            if ends.any():
                ended = alive[ends].cpu()
                lengths[ended], stopped[ended] = step + 1, True
                going = (~ends).nonzero().squeeze(1)
                alive, drawn, mask = alive[going], drawn[going], mask[going]
                if not len(alive):
                    break
                cache.reorder_cache(going)
            if step + 1 < most:
                mask = torch.cat((mask, mask.new_ones(len(alive), 1)), 1)
                positions = mask.sum(1, keepdim=True) - 1
                logits = _forward(transformer, drawn[:, None], mask, positions, cache)
        on_host = zip(tokens.cpu(), found[0].cpu(), found[1].sum(1).tolist(), lengths.tolist(), stopped, strict=True)
        return [
            Sampled(ids[:n].tolist(), logs[:n].tolist(), entropy, Ended.STOPPED if stop else Ended.CUT)
            for ids, logs, entropy, n, stop in on_host
        ]

    def _read_prompts(
        self, transformer: Any, cache: DynamicCache, requests: Sequence[Request]
    ) -> tuple[Tensor, Tensor]:
        """Fills the cache. Returns the mask int64[requests, tokens] and the logits after each prompt.

        Prompts of similar length are read together, so that little is padding, where the cache can be joined.
        """
        device, config = self._world.device, text_config_of(transformer.config)
        prompts = sorted(dict.fromkeys(request.prompt_ids for request in requests), key=len)
        longest, is_plain = len(prompts[-1]), all(isinstance(layer, ReservedLayer) for layer in cache.layers)
        number = {prompt: index for index, prompt in enumerate(prompts)}
        of_request = torch.tensor([number[request.prompt_ids] for request in requests], device=device)
        size = PROMPTS_AT_ONCE if is_plain else len(prompts)
        parts, logits = [], []
        for start in range(0, len(prompts), size):
            some = prompts[start : start + size]
            ids, mask = (_pad_left(rows, device) for rows in (some, [[1] * len(prompt) for prompt in some]))
            parts.append(make_cache(config, ids.shape[1]) if is_plain else cache)
            logits.append(_forward(transformer, ids, mask, (mask.cumsum(1) - 1).clamp(min=0), parts[-1]))
        if is_plain:
            for layer in cache.layers:
                layer.fill([part.layers.pop(0) for part in parts], of_request, longest)
        else:
            cache.reorder_cache(of_request)
        return _pad_left([[1] * len(prompt) for prompt in prompts], device)[of_request], torch.cat(logits)[of_request]


def _pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)


def _forward(transformer: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """fp32[rows, vocabulary]: the logits after the last token of each row."""
    keys = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits: Tensor = transformer(input_ids=ids, attention_mask=mask, position_ids=positions, **keys).logits
    return logits[:, -1].float()


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
