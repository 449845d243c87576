"""Samples with clients' adapters on a vLLM server, which reads the states from disk."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from finetune.config.schema import Recipe
from finetune.errors import UserError
from finetune.export.export import export_for_vllm
from finetune.rollout.engine import Request, Sampling
from finetune.rollout.vllm import VllmServer
from finetune.rollout.vllm_answers import ServedModels

KEY = "--vllm-server"  # the option, for messages
MOST_LOADED = 16  # adapters that the server has loaded at once


class ServedAdapters:
    """A vLLM server, and the adapters that it has loaded. Only rank 0 has it."""

    def __init__(self, url: str, recipe: Recipe, states: Path, vocabulary: int) -> None:
        """Checks that the server can sample for the recipe's base, and resumes it.

        Args:
            url: The server's URL, with or without /v1.
            recipe: The recipe of the service.
            states: The folder of all states, which the server can read.
            vocabulary: The number of tokens in the vocabulary.

        Raises:
            UserError: The server cannot sample for the base.
        """
        address = url.rstrip("/").removesuffix("/v1")
        self._server = VllmServer(address, recipe.rollout.vllm_server_timeout, KEY)
        self._base = self._server.check(recipe, any_temperature=True)
        self._server.resume()
        self._states = states.resolve()
        self._vocabulary = vocabulary
        self._rank = recipe.lora.lora_r
        self._threads = recipe.rollout.per_device_generation_batch_size

    def sample(
        self,
        state: str | None,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Samples a completion of each request with the adapter in a state; None: with the base.

        Returns the completions as `Sampled.as_json` writes them.
        """
        model = self._base if state is None else self._load(state)

        def complete(request: Request) -> dict[str, Any]:
            sampled = self._server.complete(model, request, sampling, stop_ids, self._vocabulary)
            return sampled.as_json()

        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(complete, requests))

    def _load(self, state: str) -> str:
        """Makes the server load the adapter in a state, unless it is loaded already.

        The server unloads the first adapters of its list, so that MOST_LOADED are not exceeded.

        Returns:
            The server's name of the adapter.

        Raises:
            UserError: The server does not load it.
        """
        folder = self._states / state
        loaded = [
            each
            for each in self._server.ask(ServedModels).data
            if Path(each.root).is_relative_to(self._states)
        ]
        for each in loaded:
            if Path(each.root).is_relative_to(folder):
                return each.id
        too_many = max(len(loaded) + 1 - MOST_LOADED, 0)
        for each in loaded[:too_many]:
            self._server.send("/v1/unload_lora_adapter", {"lora_name": each.id})
        name = f"{self._states.parents[1].name}/{state}".replace("/", "-")
        try:
            self._server.load_adapter(name, export_for_vllm(folder, folder / "vllm"))
        except UserError as error:
            raise UserError(
                f"{KEY}: {error}; start vLLM with --enable-lora and --max-lora-rank {self._rank}"
            ) from None
        return name
