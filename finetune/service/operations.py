"""What every rank does for an operation of a client, in the order in which rank 0 names them."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.config.pretrained import text_config_of
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.tokenizer import end_of_answer_ids
from finetune.distributed.gradients import without_gradient_sync
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup
from finetune.errors import AgreedError
from finetune.models.cross_entropy import HeadFunction
from finetune.models.log_probabilities import choose_label_head, head_log_probabilities, head_top
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Ended, Request, Sampled, Sampling
from finetune.service.adapters import AdapterForm, Adapters
from finetune.service.datums import Limits, by_datum, make_batch
from finetune.service.losses import LOSSES
from finetune.service.served_adapters import ServedAdapters
from finetune.service.stack import AdapterStack, can_stack
from finetune.session import Gradients, Session
from finetune.training.objectives.objective import Measured
from finetune.training.objectives.user_loss import LossFunction
from finetune.training.reference import evaluating

Answer = dict[str, Any]
# (log-probabilities fp32[positions] or [positions, targets], their micro-batch) -> fp32[positions]
TokenMeasure = Callable[[Tensor, MicroBatch], Tensor]


class Operations:
    """The operations on the model of a session. All ranks make the same calls with the same
    arguments.
    """

    def __init__(self, session: Session, folder: Path, vllm_server: str | None = None) -> None:
        """Opens the adapters' states in `folder`.

        vllm_server: The address of the server that samples; None: the model itself does.
        """
        keys = session.recipe.optimization
        session.recipe = replace(
            session.recipe, optimization=replace(keys, on_nonfinite="skip", max_skipped_steps=2**31)
        )
        self.session = session
        self._adapters = Adapters(session, folder)
        self._gradients: dict[str, Gradients] = {}  # by model, since its last update
        config = text_config_of(unwrap(session.model).config)
        longest = min(session.recipe.data.max_length, config.max_position_embeddings or 2**31)
        self.limits = Limits(config.vocab_size, longest)
        self._samples_here = vllm_server is None
        self._served: ServedAdapters | None = None
        if vllm_server is not None and session.world.is_main:
            self._served = ServedAdapters(
                vllm_server, session.recipe, folder, self.limits.vocabulary
            )
        self.can_stack = can_stack(session.model, session.recipe)

    def run(self, operation: str, arguments: Mapping[str, Any]) -> Answer:
        """Does one of `OPERATIONS`. Raises `AgreedError` on all ranks; any other is of this one."""
        return OPERATIONS[operation](self, **_with_form(arguments))

    def create(self, state: str | None, form: AdapterForm, target: str) -> Answer:
        """Writes the first state of a model: a start of its own, or that of `state`."""
        self._adapters.activate(state, form)
        return {"bytes": self._adapters.store(target, form, with_optimizer=False)}

    def load(
        self, model: str, state: str, form: AdapterForm, target: str, optimizer: bool
    ) -> Answer:
        """Writes `state` as the model's next one, with or without its optimizer's state."""
        self._adapters.activate(state, form)
        bytes_ = self._adapters.store(target, form, with_optimizer=optimizer)
        self._gradients.pop(model, None)
        return {"bytes": bytes_}

    def forward(
        self,
        state: str | None,
        form: AdapterForm,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        options: Mapping[str, float],
    ) -> Answer:
        """The loss, and every datum's log-probabilities of its targets."""
        self._adapters.activate(state, form)
        session = self.session
        batch = make_batch(data, session.recipe, session.world)
        scored: dict[int, list[Any]] = {}
        total = torch.zeros((), device=session.world.device)
        measure = _recorded(loss, options, data, scored)
        for micro_batch, values in zip(
            batch.micro_batches, session.log_probabilities(batch), strict=True
        ):
            total += measure(values, micro_batch.to(session.world.device)).sum()
        return self._describe(float(session.world.sum_over_groups(total)), scored, len(data))

    def forward_backward(
        self,
        model: str,
        state: str,
        form: AdapterForm,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        options: Mapping[str, float],
    ) -> Answer:
        """As `forward`, and adds the gradients to those of the model."""
        before = self._gradients.pop(model, None)
        self._adapters.activate(state, form)
        session = self.session
        if before is not None:
            session.give_gradients(before)
        batch = make_batch(data, session.recipe, session.world)
        scored: dict[int, list[Any]] = {}
        measure = _recorded(loss, options, data, scored)
        measured = session.forward_backward(batch, _summed(measure))
        self._gradients[model] = session.take_gradients()
        return self._describe(measured.loss, scored, len(data))

    def forward_backward_together(
        self, parts: Sequence[Mapping[str, Any]], loss: str, options: Mapping[str, float]
    ) -> Answer:
        """As `forward_backward` of several models, whose adapters share the passes of the base.

        parts: Of each its `model`, `state`, `form` and `data`.
        """
        session = self.session
        world = session.world
        stack = self._stack([_with_form(part) for part in parts])
        data = [datum for part in parts for datum in part["data"]]
        owners = [number for number, part in enumerate(parts) for _ in part["data"]]
        batch = make_batch(data, session.recipe, world)
        scored: dict[int, list[Any]] = {}
        measure = _recorded(loss, options, data, scored)
        losses = self._pass(stack, batch, owners, measure)
        gradients = stack.gather_gradients(world)
        for part, loss_sum, own in zip(parts, losses, gradients, strict=True):
            self._add_gradients(part["model"], own, (batch, Measured(loss_sum)))
        values = iter(self._gather(scored, len(data)))
        sums = world.sum_over_groups(losses.clone()).tolist()
        answers = [
            {"loss": total, "log_probabilities": [next(values) for _ in part["data"]]}
            for part, total in zip(parts, sums, strict=True)
        ]
        return {"answers": answers}

    def _pass(
        self, stack: AdapterStack, batch: StepBatch, owners: Sequence[int], measure: TokenMeasure
    ) -> Tensor:
        """Forward and backward by the adapters of `stack`.

        Args:
            stack: Whose factors get the gradients of this rank.
            batch: Of the datums of all adapters.
            owners: Of each datum, which adapter's it is.
            measure: The loss of each position.

        Returns:
            fp32[adapters]: the sum of each one's loss on this rank.
        """
        session = self.session
        device = session.world.device
        losses = torch.zeros(stack.size, device=device)
        session.model.train()
        with session.computing(), without_gradient_sync(session.model), stack.in_model():
            for micro_batch in batch.micro_batches:
                stack.deal(micro_batch, owners)
                on_device = micro_batch.to(device)
                head = choose_label_head(on_device.targets)
                scores = session.model(**on_device.inputs, head_function=head)
                of_tokens = measure(scores, on_device)
                session.world.accelerator.backward(of_tokens.sum())
                losses += _sum_by_owner(of_tokens.detach(), on_device, owners, stack.size)
        return losses

    def _stack(self, parts: Sequence[Mapping[str, Any]]) -> AdapterStack:
        whole = [self._adapters.read_whole(part["state"], part["form"]) for part in parts]
        scales = [self._adapters.scale_of(part["form"]) for part in parts]
        return AdapterStack(self.session.model, whole, scales)

    def _add_gradients(
        self, model: str, whole: Mapping[str, Tensor], backward: tuple[StepBatch, Measured]
    ) -> None:
        """Adds gradients to those of a model since its last update."""
        tensors: list[Tensor | None] = [*self._adapters.share_gradients(whole)]
        before = self._gradients.get(model, Gradients([None] * len(tensors), []))
        for place, earlier in enumerate(before.tensors):
            own = tensors[place]
            if earlier is not None and own is not None:
                tensors[place] = earlier + own
        self._gradients[model] = Gradients(tensors, [*before.backward, backward])

    def optim_step(
        self, model: str, state: str, form: AdapterForm, target: str, params: Mapping[str, float]
    ) -> Answer:
        """Updates the model by its gradients and writes its next state."""
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
        keys = replace(session.recipe.optimization, max_grad_norm=params["grad_clip_norm"] or None)
        session.recipe = replace(session.recipe, optimization=keys)
        update = session.optim_step(params["learning_rate"])
        if update.is_skipped:
            raise AgreedError(
                "optim_step: the loss or gradient is not finite; the parameters were not updated, "
                "and the gradients were dropped"
            )
        self._adapters.count_step()
        bytes_ = self._adapters.store(target, form)
        return {"bytes": bytes_, "grad_norm": update.grad_norm}

    def sample(
        self,
        state: str | None,
        form: AdapterForm,
        requests: Sequence[Mapping[str, Any]],
        temperature: float,
        stop_ids: Sequence[int] | None,
    ) -> Answer:
        """Completions of all requests together, each of which has its own numbers, and the
        log-probabilities and likeliest tokens of the prompts that ask for them.
        """
        session = self.session
        if stop_ids is None:
            stop_ids = end_of_answer_ids(session.tokenizer, session.recipe.model.eot_tokens)
        asked = [
            Request(tuple(each["prompt"]), (each["seed"], number), each["max_tokens"])
            for each in requests
            for number in range(each["samples"])
        ]
        how = Sampling(max_tokens=1, temperature=temperature or 1.0, greedy=temperature == 0)
        scored = [each["prompt"] for each in requests if each["scores_prompt"]]
        widths = [each["top_prompt"] for each in requests if each["top_prompt"]]
        topped = [each["prompt"] for each in requests if each["top_prompt"]]
        if self._samples_here or scored or topped:
            self._adapters.activate(state, form)
        if self._samples_here:
            every = self._sample_here(asked, how, stop_ids)
        else:
            every = RankGroup(session.world).on_main(
                lambda: self._sample_there(state, asked, how, stop_ids)
            )
        return {
            "sampled": every,
            "prompts": self._run_head(scored, head_log_probabilities),
            "tops": self._find_top(topped, widths),
        }

    def _sample_here(
        self, asked: Sequence[Request], how: Sampling, stop_ids: Sequence[int]
    ) -> list[Answer]:
        """Samples by the adapter in the model; the ranks divide the requests."""
        session = self.session
        rows = session.recipe.rollout.per_device_generation_batch_size
        engine = EmbeddedEngine(session.model, session.world, stop_ids, rows)
        mine = session.world.data_parallel
        with session.computing():
            sampled = engine.sample(asked[mine.rank :: mine.size], how)
        by_rank = session.world.gather([each.as_json() for each in sampled])
        step = len(by_rank) // mine.size  # ranks that sample the same
        return [by_rank[i % mine.size * step][i // mine.size] for i in range(len(asked))]

    def _sample_there(
        self, state: str | None, asked: Sequence[Request], how: Sampling, stop_ids: Sequence[int]
    ) -> list[Answer]:
        """Samples by the vLLM server, for rank 0."""
        assert self._served is not None
        return [each.as_json() for each in self._served.sample(state, asked, how, stop_ids)]

    def _find_top(
        self, prompts: Sequence[Sequence[int]], widths: Sequence[int]
    ) -> list[list[list[list[float]]]]:
        """Finds for each token after a prompt's first the likeliest ids with their
        log-probabilities, as many as the prompt's width.
        """
        every = self._run_head(prompts, head_top(max(widths, default=1)))
        return [[row[:width] for row in rows] for rows, width in zip(every, widths, strict=True)]

    def _run_head(self, prompts: Sequence[Sequence[int]], head: HeadFunction) -> list[list[Any]]:
        """Returns the results of `head` at each prompt's tokens after the first, by the adapter
        that is in the model.
        """
        data = [_as_datum(prompt) for prompt in prompts if len(prompt) > 1]
        if not data:
            return [[] for _ in prompts]
        session = self.session
        scored: dict[int, list[Any]] = {}
        with evaluating(session.model), session.computing():
            for micro_batch in make_batch(data, session.recipe, session.world).micro_batches:
                inputs = micro_batch.to(session.world.device).inputs
                values = session.model(**inputs, head_function=head)
                scored |= by_datum(micro_batch, values.cpu(), data)
        scores = iter(self._gather(scored, len(data)))
        return [next(scores) if len(prompt) > 1 else [] for prompt in prompts]

    def _describe(self, loss: float, scored: Mapping[int, list[Any]], count: int) -> Answer:
        return {"loss": loss, "log_probabilities": self._gather(scored, count)}

    def _gather(self, scored: Mapping[int, list[Any]], count: int) -> list[list[Any]]:
        """Gathers the results of all ranks, in the order of the datums."""
        every: dict[int, list[Any]] = {}
        for of_rank in self.session.world.gather([*scored.items()]):
            every |= dict(of_rank)
        return [every[place] for place in range(count)]


OPERATIONS: Mapping[str, Callable[..., Answer]] = {
    "create": Operations.create,
    "load": Operations.load,
    "forward": Operations.forward,
    "forward_backward": Operations.forward_backward,
    "forward_backward_together": Operations.forward_backward_together,
    "optim_step": Operations.optim_step,
    "sample": Operations.sample,
}


def _with_form(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with the form of an adapter in place of its fields."""
    if "form" not in arguments:
        return dict(arguments)
    return {**arguments, "form": AdapterForm(**arguments["form"])}


def _recorded(
    loss: str,
    options: Mapping[str, float],
    data: Sequence[Mapping[str, Any]],
    scored: dict[int, list[Any]],
) -> TokenMeasure:
    """The loss of each position, which notes the log-probabilities of the datums in `scored`; zeros
    for a filler, so that its backward takes part in the ranks' collectives.
    """
    known = LOSSES[loss]
    usual = {name: value for name, value in known.options.items() if value is not None}
    chosen = {**usual, **options}

    def measure(log_probabilities: Tensor, micro_batch: MicroBatch) -> Tensor:
        if not micro_batch.example_ids:
            return log_probabilities * 0.0
        documents = micro_batch.trained_documents
        assert micro_batch.columns is not None and documents is not None
        scored.update(by_datum(micro_batch, log_probabilities.detach(), data))
        losses = known.compute(log_probabilities, micro_batch.columns, chosen, documents)
        return losses if micro_batch.targets is None else losses.sum(1)

    return measure


def _summed(measure: TokenMeasure) -> LossFunction:
    """The loss as `Session.forward_backward` takes it."""
    return lambda log_probabilities, micro_batch: measure(log_probabilities, micro_batch).sum()


def _sum_by_owner(
    of_tokens: Tensor, micro_batch: MicroBatch, owners: Sequence[int], count: int
) -> Tensor:
    """fp32[count]: the sums of what positions have, by the owner of their datum."""
    sums = torch.zeros(count, device=of_tokens.device)
    if not micro_batch.example_ids:
        return sums
    documents = micro_batch.trained_documents
    assert documents is not None
    own = torch.tensor([owners[i] for i in micro_batch.example_ids], device=sums.device)
    return sums.index_add(0, own[documents], of_tokens)


def _as_datum(prompt: Sequence[int]) -> dict[str, Any]:
    return {"tokens": prompt[:-1], "inputs": {"target_tokens": prompt[1:]}}


def cut_at(sampled: Sampled, texts: Sequence[str], decode: Callable[[list[int]], str]) -> Sampled:
    """A completion up to the first token with which one of `texts` is in what was said."""
    ids = sampled.token_ids

    def has_ended(end: int) -> bool:
        said = decode(ids[:end])
        return any(text in said for text in texts)

    if not texts or not has_ended(len(ids)):
        return sampled
    end = bisect_left(range(len(ids)), True, key=has_ended)
    scores = sampled.log_probabilities[:end]
    return replace(sampled, token_ids=ids[:end], log_probabilities=scores, ended=Ended.STOPPED)
