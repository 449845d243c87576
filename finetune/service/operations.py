"""The operations on adapters that clients ask for. Every rank does them in the same order."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.facts import is_random
from finetune.config.pretrained import read_positions, text_config_of
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.tokenizer import find_stop_token_ids
from finetune.distributed.gradients import without_gradient_sync
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup
from finetune.errors import AgreedError
from finetune.models.cross_entropy import HeadFunction
from finetune.models.log_probabilities import choose_label_head, head_log_probabilities, head_top
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Request, Sampled, Sampling, sample_shares
from finetune.service.adapters import AdapterForm, Adapters
from finetune.service.datums import Limits, group_by_datum, make_batch
from finetune.service.losses import LOSSES
from finetune.service.served_adapters import ServedAdapters
from finetune.service.stack import AdapterStack, can_stack
from finetune.session import Gradients, Session
from finetune.training.objectives.objective import Measured
from finetune.training.reference import evaluating

Answer = dict[str, Any]
# (log-probabilities fp32[positions] or [positions, targets], their micro-batch) -> fp32[positions]
TokenMeasure = Callable[[Tensor, MicroBatch], Tensor]


class Operations:
    """The operations on a session's model. All ranks make the same calls with equal arguments."""

    def __init__(self, session: Session, folder: Path, vllm_server: str | None = None) -> None:
        """Prepares the session for adapters that take turns.

        Args:
            session: A session whose model has an adapter.
            folder: The folder of the adapters' states.
            vllm_server: The address of the vLLM server that samples; None: the session's model
                samples.
        """
        # An update that is not finite is an error of one client, and must not end the service.
        keys = replace(session.recipe.optimization, on_nonfinite="skip", max_skipped_steps=2**31)
        session.recipe = replace(session.recipe, optimization=keys)
        self.session = session
        _turn_off_dropout(session.model)
        self._adapters = Adapters(session, folder)
        self._gradients: dict[str, Gradients] = {}  # model -> gradients since its last update
        config: Any = unwrap(session.model).config
        max_length = session.recipe.data.max_length
        longest = min(max_length, read_positions(config) or max_length)
        self.limits = Limits(vocabulary=text_config_of(config).vocab_size, tokens=longest)
        self._samples_here = vllm_server is None
        self._served: Any = None  # on rank 0 a `ServedAdapters`, if a vLLM server samples
        if vllm_server is not None and session.world.is_main:
            self._served = ServedAdapters(
                vllm_server, session.recipe, folder, self.limits.vocabulary
            )
        self.can_stack = can_stack(session.model, session.recipe)

    def run(self, operation: str, arguments: Mapping[str, Any]) -> Answer:
        """Does one of `OPERATIONS`.

        An `AgreedError` is raised on all ranks; any other error may be raised on this rank alone.
        """
        return OPERATIONS[operation](self, **_with_form(arguments))

    def load(
        self, model: str, state: str | None, form: AdapterForm, target: str, optimizer: bool = False
    ) -> Answer:
        """Copies `state` to the model's next state `target`, and drops the model's gradients.

        state: None: a new adapter.
        optimizer: Whether the optimizer's moments and steps are copied; else they become 0.
        """
        self._adapters.activate(state, form)
        size = self._adapters.store(target, form, with_optimizer=optimizer)
        self._gradients.pop(model, None)
        return {"bytes": size}

    def drop_gradients(self, models: Sequence[str]) -> Answer:
        """Drops the gradients of models, of which some may have none."""
        for model in models:
            self._gradients.pop(model, None)
        return {}

    def forward(
        self,
        state: str | None,
        form: AdapterForm,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        options: Mapping[str, float],
    ) -> Answer:
        """Computes the loss without gradients.

        Args:
            state: The adapter's state; None: a new adapter.
            form: The form of the adapter.
            data: The datums: `tokens`, and `inputs` by name, as `check_datums` admits them.
            loss: The name of the loss in `LOSSES`.
            options: The options of the loss, by name.

        Returns:
            {"loss": the sum over all datums, "log_probabilities": a list for each datum with those
            of the targets}.
        """
        self._adapters.activate(state, form)
        session = self.session
        batch = make_batch(data, session.recipe, session.world)
        logprobs: dict[int, list[Any]] = {}
        total = torch.zeros((), device=session.world.device)
        measure = _make_measure(loss, options, data, logprobs)
        for micro_batch, values in zip(
            batch.micro_batches, session.log_probabilities(batch), strict=True
        ):
            total += measure(values, micro_batch.to(session.world.device)).sum()
        loss_sum = float(session.world.sum_over_groups(total))
        return {"loss": loss_sum, "log_probabilities": self._gather(logprobs, len(data))}

    def forward_backward(
        self,
        model: str,
        state: str,
        form: AdapterForm,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        options: Mapping[str, float],
    ) -> Answer:
        """Computes the loss, and adds its gradients to those since the model's last update.

        Args and result are those of `forward`; `model` is the model's name. After an error the
        model has no gradients.
        """
        earlier = self._gradients.pop(model, None)
        session = self.session
        # Before the session has this model's gradients: an error would leave them to the next one.
        batch = make_batch(data, session.recipe, session.world)
        self._adapters.activate(state, form)
        if earlier is not None:
            session.give_gradients(earlier)
        logprobs: dict[int, list[Any]] = {}
        measure = _make_measure(loss, options, data, logprobs)
        measured = session.forward_backward(
            batch, lambda values, micro_batch: measure(values, micro_batch).sum()
        )
        self._gradients[model] = session.take_gradients()
        return {"loss": measured.loss, "log_probabilities": self._gather(logprobs, len(data))}

    def forward_backward_together(
        self, parts: Sequence[Mapping[str, Any]], loss: str, options: Mapping[str, float]
    ) -> Answer:
        """Does `forward_backward` for several models in one forward and backward of the base.

        Args:
            parts: For each model the arguments `model`, `state`, `form` and `data` of
                `forward_backward`.
            loss: The name of the loss in `LOSSES`.
            options: The options of the loss, by name.

        Returns:
            {"answers": the answer of `forward_backward` for each part, in order}.
        """
        session = self.session
        world = session.world
        stack = self._stack_adapters([_with_form(part) for part in parts])
        data: list[Mapping[str, Any]] = []
        owners: list[int] = []  # for each datum, the index of its part
        for index, part in enumerate(parts):
            data += part["data"]
            owners += [index] * len(part["data"])
        batch = make_batch(data, session.recipe, world)
        logprobs: dict[int, list[Any]] = {}
        measure = _make_measure(loss, options, data, logprobs)
        losses = self._run_stack(stack, batch, owners, measure)
        gradients = stack.gather_gradients(world)
        for part, loss_sum, gradient in zip(parts, losses, gradients, strict=True):
            self._add_gradients(part["model"], gradient, (batch, Measured(loss_sum)))
        log_probabilities = self._gather(logprobs, len(data))
        answers: list[Answer] = []
        for total in world.sum_over_groups(losses.clone()).tolist():
            answers.append({"loss": total, "log_probabilities": []})
        for owner, datum_logprobs in zip(owners, log_probabilities, strict=True):
            answers[owner]["log_probabilities"].append(datum_logprobs)
        return {"answers": answers}

    def _run_stack(
        self, stack: AdapterStack, batch: StepBatch, owners: Sequence[int], measure: TokenMeasure
    ) -> Tensor:
        """Runs the forwards and backwards of a batch in which each datum has its own adapter.

        Args:
            stack: The adapters, which collect this rank's gradients.
            batch: The datums of all adapters.
            owners: For each datum, the index of its adapter in `stack`.
            measure: Computes the loss of each position.

        Returns:
            fp32[adapters]: the loss of each adapter, summed over this rank's positions.
        """
        session = self.session
        device = session.world.device
        losses = torch.zeros(stack.size, device=device)
        session.model.train()
        with session.computing(), without_gradient_sync(session.model), stack.in_model():
            for micro_batch in batch.micro_batches:
                stack.assign_tokens(micro_batch, owners)
                on_device = micro_batch.to(device)
                head = choose_label_head(on_device.targets)
                log_probabilities = session.model(**on_device.inputs, head_function=head)
                position_losses = measure(log_probabilities, on_device)
                session.world.accelerator.backward(position_losses.sum())
                losses += _sum_by_adapter(position_losses.detach(), on_device, owners, stack.size)
        return losses

    def _stack_adapters(self, parts: Sequence[Mapping[str, Any]]) -> AdapterStack:
        """Stacks the adapter of each part: the one in its `state`, which has the form `form`."""
        adapters = [self._adapters.read_whole(part["state"], part["form"]) for part in parts]
        scales = [self._adapters.compute_scale(part["form"]) for part in parts]
        return AdapterStack(self.session.model, adapters, scales)

    def _add_gradients(
        self, model: str, unsharded: Mapping[str, Tensor], backward: tuple[StepBatch, Measured]
    ) -> None:
        """Adds gradients to those since a model's last update.

        Args:
            model: The model's name.
            unsharded: Parameter name -> gradient to add.
            backward: The batch that went backward, and the model's loss on this rank.
        """
        added = self._adapters.shard_gradients(unsharded)
        earlier = self._gradients.get(model, Gradients([None] * len(added), []))
        sums: list[Tensor | None] = [
            new if old is None else old + new
            for old, new in zip(earlier.tensors, added, strict=True)
        ]
        self._gradients[model] = Gradients(sums, [*earlier.backward, backward])

    def optim_step(
        self, model: str, state: str, form: AdapterForm, target: str, params: Mapping[str, float]
    ) -> Answer:
        """Updates a model by its gradients and writes the next state.

        Args:
            model: The model's name.
            state: The model's state.
            form: The form of the adapter.
            target: The name of the next state.
            params: The fields of `endpoints.AdamParams`. A `grad_clip_norm` of 0 does not clip.

        Returns:
            {"bytes": the size of the next state, "grad_norm": the 2-norm before clipping}.
        """
        gradients = self._gradients.pop(model, None)
        if gradients is None:
            raise AgreedError("optim_step: no gradients; call forward_backward first")
        self._adapters.activate(state, form)
        session = self.session
        session.give_gradients(gradients)
        for group in session.optimizer.param_groups:
            group["betas"] = (params["beta1"], params["beta2"])
            group["eps"] = params["eps"]
            group["weight_decay"] = params["weight_decay"]
        # `Session.optim_step` reads the bound of the gradient from the recipe.
        keys = replace(session.recipe.optimization, max_grad_norm=params["grad_clip_norm"] or None)
        session.recipe = replace(session.recipe, optimization=keys)
        update = session.optim_step(params["learning_rate"])
        if update.is_skipped:
            raise AgreedError(
                "optim_step: the loss or gradient is not finite; the parameters were not updated, "
                "and the gradients were dropped"
            )
        self._adapters.count_step()
        size = self._adapters.store(target, form)
        return {"bytes": size, "grad_norm": update.grad_norm}

    def sample(
        self,
        state: str | None,
        form: AdapterForm,
        requests: Sequence[Mapping[str, Any]],
        temperature: float,
        stop_ids: Sequence[int] | None,
    ) -> Answer:
        """Samples the completions of all requests together, and scores prompts.

        Args:
            state: The adapter's state; None: the base samples.
            form: The form of the adapter.
            requests: Each has `prompt` (token ids), `samples` (the number of completions),
                `max_tokens`, `seed`, `scores_prompt` (whether to score the prompt) and `top_prompt`
                (the number of likeliest tokens to find at each token of the prompt; 0: none).
            temperature: The temperature; 0 takes the likeliest token.
            stop_ids: The ids that end a completion; None: those that end a turn.

        Returns:
            {"sampled": the completions of all requests in order; "prompts": the log-probabilities
            of each prompt that is scored; "tops": what `_find_top` returns for the prompts with a
            `top_prompt`}.
        """
        session = self.session
        if stop_ids is None:
            stop_ids = find_stop_token_ids(session.tokenizer)
        completions = []
        for request in requests:
            for number in range(request["samples"]):
                seed = (request["seed"], number)
                completions.append(Request(tuple(request["prompt"]), seed, request["max_tokens"]))
        # Every request has a `max_tokens`, which replaces that of the `Sampling`.
        sampling = Sampling(max_tokens=1, temperature=temperature or 1.0, greedy=temperature == 0)
        scored_prompts = [request["prompt"] for request in requests if request["scores_prompt"]]
        with_top = [request for request in requests if request["top_prompt"]]
        if self._samples_here or scored_prompts or with_top:
            self._adapters.activate(state, form)
        if self._samples_here:
            rows = session.recipe.rollout.per_device_generation_batch_size
            engine = EmbeddedEngine(session.model, session.world, stop_ids, rows)
            with session.computing():
                sampled = sample_shares(engine, session.world, sampling, completions)
        else:
            answers = RankGroup(session.world).on_main(
                lambda: self._served.sample(state, completions, sampling, stop_ids)
            )
            sampled = [Sampled.of_json(answer) for answer in answers]
        top_prompts = [request["prompt"] for request in with_top]
        widths = [request["top_prompt"] for request in with_top]
        return {
            "sampled": sampled,
            "prompts": self._run_head(scored_prompts, head_log_probabilities),
            "tops": self._find_top(top_prompts, widths),
        }

    def _find_top(
        self, prompts: Sequence[Sequence[int]], widths: Sequence[int]
    ) -> list[list[list[list[float]]]]:
        """Finds the likeliest tokens at each token of the prompts after the first.

        Args:
            prompts: The token ids of each prompt.
            widths: For each prompt, how many tokens to find.

        Returns:
            [prompts][tokens after the first][width]: [id, log-probability], the likeliest first.
        """
        widest = self._run_head(prompts, head_top(max(widths, default=1)))
        return [[row[:width] for row in rows] for rows, width in zip(widest, widths, strict=True)]

    def _run_head(self, prompts: Sequence[Sequence[int]], head: HeadFunction) -> list[list[Any]]:
        """Computes `head` at each token of the prompts after the first.

        The adapter in the model takes part.

        Returns:
            For each prompt, a result for each of these tokens; empty for a prompt of one token.
        """
        data = [
            {"tokens": prompt[:-1], "inputs": {"target_tokens": prompt[1:]}}
            for prompt in prompts
            if len(prompt) > 1
        ]
        if not data:
            return [[] for _ in prompts]
        session = self.session
        results: dict[int, list[Any]] = {}
        with evaluating(session.model), session.computing():
            for micro_batch in make_batch(data, session.recipe, session.world).micro_batches:
                inputs = micro_batch.to(session.world.device).inputs
                values = session.model(**inputs, head_function=head)
                results |= group_by_datum(micro_batch, values.cpu(), data)
        in_order = iter(self._gather(results, len(data)))
        return [next(in_order) if len(prompt) > 1 else [] for prompt in prompts]

    def _gather(self, results: Mapping[int, list[Any]], count: int) -> list[list[Any]]:
        """Gathers the results of all ranks; returns them in the order of the datums.

        Args:
            results: Index of a datum -> the result, for this rank's datums.
            count: The number of datums on all ranks.
        """
        results_of_all: dict[int, list[Any]] = {}
        for items in self.session.world.gather([*results.items()]):
            results_of_all |= dict(items)
        return [results_of_all[index] for index in range(count)]


OPERATIONS: Mapping[str, Callable[..., Answer]] = {
    "create": Operations.load,
    "load": Operations.load,
    "drop_gradients": Operations.drop_gradients,
    "forward": Operations.forward,
    "forward_backward": Operations.forward_backward,
    "forward_backward_together": Operations.forward_backward_together,
    "optim_step": Operations.optim_step,
    "sample": Operations.sample,
}


def _turn_off_dropout(model: nn.Module) -> None:
    """Sets all dropouts of the base to 0: a loss depends on a client's data and adapter alone."""
    for holder in (text_config_of(unwrap(model).config), *model.modules()):
        for name, value in list(vars(holder).items()):
            if is_random(name, value) or (isinstance(holder, nn.Dropout) and name == "p"):
                setattr(holder, name, 0.0)


def _with_form(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments; their `form`, if there is one, is made an `AdapterForm`."""
    if "form" not in arguments:
        return dict(arguments)
    return {**arguments, "form": AdapterForm(**arguments["form"])}


def _make_measure(
    loss: str,
    options: Mapping[str, float],
    data: Sequence[Mapping[str, Any]],
    logprobs: dict[int, list[Any]],
) -> TokenMeasure:
    """Makes the function that computes the loss of each position of a micro-batch.

    For a filler it computes zeros from the model's output: the backward of these zeros takes part
    in the ranks' collectives.

    Args:
        loss: The name of the loss in `LOSSES`.
        options: The options that the client gave; the others have their defaults.
        data: All datums of the batch.
        logprobs: The function adds to it: index of a datum -> log-probabilities of the targets.
    """
    token_loss = LOSSES[loss]
    defaults = {name: value for name, value in token_loss.options.items() if value is not None}
    all_options = {**defaults, **options}

    def measure(log_probabilities: Tensor, micro_batch: MicroBatch) -> Tensor:
        if not micro_batch.example_ids:
            return log_probabilities * 0.0
        documents = micro_batch.trained_documents
        assert micro_batch.columns is not None and documents is not None
        logprobs.update(group_by_datum(micro_batch, log_probabilities.detach(), data))
        losses = token_loss.compute(log_probabilities, micro_batch.columns, all_options, documents)
        return losses if micro_batch.targets is None else losses.sum(1)

    return measure


def _sum_by_adapter(
    losses: Tensor, micro_batch: MicroBatch, owners: Sequence[int], count: int
) -> Tensor:
    """Sums the losses of a micro-batch by adapter.

    Args:
        losses: fp32[positions].
        micro_batch: The micro-batch of these positions; a filler adds nothing.
        owners: For each datum of the batch, the index of its adapter.
        count: The number of adapters.

    Returns:
        fp32[count].
    """
    sums = torch.zeros(count, device=losses.device)
    if not micro_batch.example_ids:
        return sums
    documents = micro_batch.trained_documents
    assert documents is not None
    adapters = torch.tensor([owners[i] for i in micro_batch.example_ids], device=sums.device)
    return sums.index_add(0, adapters[documents], losses)


def cut_at(sampled: Sampled, texts: Sequence[str], decode: Callable[[list[int]], str]) -> Sampled:
    """Cuts a completion after the first token at which the text has one of `texts`.

    Returns the completion unchanged if it has none of them.
    """
    ids = sampled.token_ids

    def has_ended(end: int) -> bool:
        decoded = decode(ids[:end])
        return any(text in decoded for text in texts)

    if not texts or not has_ended(len(ids)):
        return sampled
    end = bisect_left(range(len(ids)), True, key=has_ended)
    scores = sampled.log_probabilities[:end]
    return replace(sampled, token_ids=ids[:end], log_probabilities=scores, ended=Ended.STOPPED)
