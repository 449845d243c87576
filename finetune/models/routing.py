"""Counts which experts the routers of a mixture choose while it trains, and computes the auxiliary
loss that keeps them balanced.

The loss is that of Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, over all layers together, as
transformers computes it:

    auxiliary = experts * sum over experts of share_e * probability_e

share_e is the number of tokens that chose expert e, and probability_e the sum of the tokens'
probabilities of e, each divided by the number of tokens. The tokens are those of all ranks,
micro-batches and layers of the step: one token counts once in each layer. Padding does not count.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from finetune.config.facts import count_chosen, count_experts
from finetune.distributed.model_parts import trunk_of
from finetune.distributed.world import World
from finetune.errors import UserError

ATTRIBUTE = "expert_routing"  # of a transformers model: its `Routing`
OUTPUT = "seen_output"  # of a router: its output, until the model's forward ends


def install_routing(model: Any, coefficient: float | None) -> None:
    """Adds a `Routing` to `model`; a dense model gets none. Call it before sharding.

    Args:
        model: A transformers model.
        coefficient: The recipe's coefficient of the auxiliary loss. None takes that of the model's
            config if its `output_router_logits` is on, else 0. Rules have checked that the family
            has an auxiliary loss.

    Raises:
        UserError: The recipe has a coefficient, and no router is found.
    """
    config = model.config.get_text_config()
    routers = _find_routers(model)
    if coefficient is None and getattr(config, "output_router_logits", False):
        coefficient_used = getattr(config, "router_aux_loss_coef", None)
    else:
        coefficient_used = coefficient
    if coefficient and not routers:  # a model with code of its own, which the rules cannot check
        raise UserError(
            f"router_aux_loss_coef: the routers of {type(model).__name__} are not found; remove "
            "the key"
        )
    if routers:
        setattr(model, ATTRIBUTE, Routing(model, routers, config, coefficient_used or 0.0))


def find_routing(model: Any) -> "Routing | None":
    """Returns the `Routing` of an unwrapped transformers model; None for a dense one."""
    return getattr(model, ATTRIBUTE, None)


class Routing:
    """Hooks that count the choices of one model's routers, and its auxiliary loss."""

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[tuple[nn.Module, int]],
        config: Any,
        coefficient: float,
    ) -> None:
        """Registers the hooks.

        Args:
            model: The mixture.
            routers: What `_find_routers` returns.
            config: The config of the language model.
            coefficient: Of the auxiliary loss; 0 without one.
        """
        self.coefficient = coefficient
        self._routers = routers
        self.layers = len(routers)
        self.experts = count_experts(config.to_dict())
        self._chosen_per_token = count_chosen(config.to_dict()) or 1
        # Since the last line of metrics: fp32[layers, experts], the tokens of each expert on this
        # rank; this rank's part of the auxiliary losses; the optimizer steps.
        self._counts: Tensor | None = None
        self._auxiliary: Tensor | None = None
        self._steps = 0
        # Whether a training forward is running. In a backward it is not, so that recomputed layers
        # do not count twice.
        self._is_open = False
        self._is_counted = True  # whether forwards add to `_counts`
        # Of the latest forward:
        self._device = torch.device("cpu")
        self._mask: Tensor | None = None  # [tokens], 0 at padding; None: no padding
        self._logits: dict[int, Tensor] = {}  # layer -> [tokens, experts], for the auxiliary loss
        # Of `replay`: the experts that the latest forward has to choose, int16[tokens, layers,
        # chosen]; and by layer, the choices recorded until `take_choices`, None if not recording.
        self._replayed: Tensor | None = None
        self._choices: list[list[Tensor]] | None = None
        model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        model.register_forward_hook(self._end_forward)
        for router, _ in routers:
            router.register_forward_hook(self._keep_output)

    def _begin_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Takes the arguments that concern routers, and forgets the forward before."""
        self._is_open = model.training and "labels" in kwargs
        mask = kwargs.get("token_mask")
        self._mask = None if mask is None else mask.flatten()
        replayed = kwargs.get("replayed_experts")
        self._replayed = None if replayed is None else replayed.flatten(0, 1)
        self._logits.clear()
        for router, _ in self._routers:
            vars(router).pop(OUTPUT, None)

    def replay(self) -> None:
        """Makes the routers choose the experts that a forward gets as its argument
        `replayed_experts` (R3, arXiv:2510.11370), and lets `recording` record their choices.

        Layers that the backward recomputes choose the same. The weights of the experts come from
        the logits of this forward, and have gradients.
        """
        for layer, (router, _) in enumerate(self._routers):
            router.forward = self._wrap_forward(layer, router)

    def _wrap_forward(self, layer: int, router: nn.Module) -> Callable[..., Any]:
        """Makes a forward of `router` that replays and records the choices of `layer`.

        It raises `UserError` unless the router calls topk once, on [tokens, experts].
        """
        plain_forward = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            replayed = None if self._replayed is None else self._replayed[:, layer]
            with GivenChoices([replayed]) as choices:
                output = plain_forward(*args, **kwargs)
            if len(choices.chosen) != 1 or choices.chosen[0].dim() != 2:
                raise UserError(
                    f"routing_replay: {type(router).__name__} does not choose a token's experts as "
                    "the highest of one row of scores; remove the key"
                )
            if self._choices is not None:
                self._choices[layer].append(choices.chosen[0].to(torch.int16))
            return output

        return forward

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records in this block what the routers choose. It needs `replay` before."""
        self._choices = [[] for _ in self._routers]
        try:
            yield
        finally:
            self._choices = None

    def take_choices(self) -> Tensor:
        """Returns the choices recorded since the last call, int16[tokens, layers, chosen]."""
        assert self._choices is not None
        choices = torch.stack([torch.cat(of_layer) for of_layer in self._choices], 1)
        self._choices = [[] for _ in self._routers]
        return choices

    def _keep_output(self, router: nn.Module, _inputs: Any, output: Any) -> None:
        """Keeps the output of a router in a training forward, until `_end_forward`."""
        # A compiled layer is one graph for the forward and for its recomputation. So it always
        # keeps the output, and the recomputation ends before it would.
        if self._is_open or torch.compiler.is_compiling():
            setattr(router, OUTPUT, output)

    def _end_forward(self, _model: nn.Module, _args: Any, result: Tensor) -> None:
        """Adds the choices of a training forward to the counts, and keeps its logits for the
        auxiliary loss.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._device = result.device
        if self._is_counted and self._counts is None:
            self._counts = torch.zeros(self.layers, self.experts, device=self._device)
        for layer, (router, logits_index) in enumerate(self._routers):
            output = vars(router).pop(OUTPUT, None)
            if output is None:  # a layer of another pipeline stage
                continue
            outputs = output if isinstance(output, tuple) else (output,)
            logits = outputs[logits_index].flatten(0, -2)
            if self.coefficient:
                self._logits[layer] = logits
            if self._is_counted:
                assert self._counts is not None
                chosen = _find_chosen(outputs, logits, self._chosen_per_token)
                self._counts[layer] += self._count(chosen)

    def _count(self, chosen: Tensor) -> Tensor:
        """Counts the tokens of each expert, without padding: fp32[experts].

        chosen: int64[tokens, chosen], the experts of each token.
        """
        ones = torch.ones(chosen.shape, device=chosen.device)
        if self._mask is not None:
            ones = ones * self._mask[:, None]
        # The last place is for indices beyond the experts, which are dropped: a choice of no expert
        # (Zaya), or of one that only passes its input on (LongCat Flash).
        counts = torch.zeros(self.experts + 1, device=chosen.device)
        indices = chosen.flatten().clamp(max=self.experts)
        return counts.scatter_add_(0, indices, ones.flatten())[:-1]

    def count_selected(self) -> Tensor:
        """Counts the tokens of each expert in the latest forward, over all layers: fp32[experts].

        A token's experts are those of the highest probabilities, also where a router chooses by
        other scores.
        """
        chosen_of_layers = (
            logits.detach().softmax(-1).topk(self._chosen_per_token).indices
            for logits in self._logits.values()
        )
        # the result on a rank of a pipeline that has only dense layers
        zeros = torch.zeros(self.experts, device=self._device)
        return sum((self._count(chosen) for chosen in chosen_of_layers), zeros)

    def run_and_count_selected(
        self, model: nn.Module, inputs: Iterable[dict[str, Any]], device: torch.device
    ) -> Tensor:
        """Runs a forward for each of `inputs` without gradients, and adds up their
        `count_selected`: fp32[experts].

        Neither the metrics' counts nor the random state change.
        """
        self._is_counted = False
        total = torch.zeros(self.experts, device=device)
        no_positions = torch.zeros(0, dtype=torch.int64, device=device)  # the loss is not needed
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            ):
                for arguments in inputs:
                    model(**arguments | {"trained_positions": no_positions})
                    total += self.count_selected()
        finally:
            self._is_counted = True
        return total

    def auxiliary_loss(self, selected: Tensor) -> Tensor:
        """Computes what the latest forward adds to the step's auxiliary loss, 0-dim fp32, before it
        is multiplied by the coefficient.

        Adds it to the metrics, too.

        Args:
            selected: fp32[experts], the tokens of each expert in the whole step, over all layers.
                Their sum says how many tokens were routed: a batch also counts tokens that are not
                trained on, such as the mismatched answers of `method: kto`.
        """
        probability_sums = torch.zeros(self.experts, device=selected.device)
        for logits in self._logits.values():
            probabilities = logits.float().softmax(-1)
            if self._mask is not None:
                probabilities = probabilities * self._mask[:, None]
            probability_sums = probability_sums + probabilities.sum(0)
        # a token counts once in each layer
        routed = (selected.sum() / self._chosen_per_token).clamp(min=1)
        loss = self.experts * (selected / routed * probability_sums / routed).sum()
        if self._auxiliary is None:
            self._auxiliary = loss.detach()
        else:
            self._auxiliary = self._auxiliary + loss.detach()
        return loss

    def end_step(self) -> None:
        """Counts an optimizer step, for the mean of the auxiliary loss; frees the kept logits."""
        self._logits.clear()
        self._steps += 1

    def take_metrics(self, world: World) -> dict[str, Any]:
        """Returns the metrics of the steps since the last call, over all ranks. All ranks call it.

        They are for each layer the largest share of the layer's tokens that one expert received
        (1 / experts if all received equally many), and the share of its experts that received none;
        the largest of both over the layers; with an auxiliary loss, its mean over the steps. {} if
        no training forward has run since.
        """
        if self._counts is None:
            return {}
        counts = world.sum(self._counts).cpu()
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        largest = [round(float(share), 4) for share in shares.max(1).values]
        idle = [round(float(share), 4) for share in (counts == 0).float().mean(1)]
        metrics: dict[str, Any] = {
            "largest_expert_share": max(largest),
            "idle_expert_share": max(idle),
            "largest_expert_share_by_layer": largest,
            "idle_expert_share_by_layer": idle,
        }
        if self._auxiliary is not None:
            metrics["router_aux_loss"] = world.sum(self._auxiliary).item() / max(1, self._steps)
        self._counts = None
        self._auxiliary = None
        self._steps = 0
        return metrics


class GivenChoices(TorchFunctionMode):
    """Replaces the choices of `topk` in this block by given ones, and records all choices.

    A router chooses a token's experts by `topk`, and sparse attention chooses keys by it.
    """

    def __init__(self, given: Sequence[Tensor | None] = ()) -> None:
        """
        Args:
            given: For each call of `topk`, the indices to choose, int[..., chosen]. The scores
                decide where an index is negative, and in calls for which there is None or nothing.
        """
        super().__init__()
        self._given = iter(given)
        self.chosen: list[Tensor] = []  # the indices chosen by each call, int64[..., chosen]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk):
            return result
        given = next(self._given, None)
        if given is None:
            self.chosen.append(result.indices)
            return result
        indices = torch.where(given < 0, result.indices, given.long())
        self.chosen.append(indices)
        scores = args[0]
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def _find_routers(model: Any) -> list[tuple[nn.Module, int]]:
    """Finds the routers of `model` in the order of its layers, as (router, the index of the logits
    in its output); [] for a dense model.

    Routers are what transformers records for `output_router_logits`.
    """
    recorders = getattr(model, "_can_record_outputs", None) or {}
    trunk_recorders = getattr(trunk_of(model), "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits") or trunk_recorders.get("router_logits")
    target: Any = getattr(recorder, "target_class", recorder)
    if not isinstance(target, type):
        return []
    modules: list[Any] = [module for module in model.modules() if type(module) is target]
    return [(module, getattr(recorder, "index", 0)) for module in modules]


def _find_chosen(outputs: Sequence[Any], logits: Tensor, count: int) -> Tensor:
    """Finds the experts of each token, int64[tokens, count]: the router's own choice if its outputs
    have one, else those of the highest logits.
    """
    indices = [
        each
        for each in outputs
        if isinstance(each, Tensor) and each.dtype == torch.int64 and each.dim() == 2
    ]
    return indices[-1] if indices else logits.detach().topk(count).indices


def auxiliary_loss_of_step(
    model: nn.Module,
    routing: Routing | None,
    inputs: Iterable[dict[str, Any]],
    world: World,
    *,
    is_one_forward: bool,
) -> Callable[[Tensor], Tensor]:
    """Makes a function that adds the latest forward's part of the auxiliary loss to its loss.

    The function returns the loss unchanged if there is no auxiliary loss.

    The auxiliary loss multiplies each token's probabilities by the counts of the whole step. With
    several micro-batches the first backward needs the counts of the last, so this runs a forward of
    each without gradients first. All ranks call this and the function.

    Args:
        model: The mixture.
        routing: The model's routing; None for a dense model.
        inputs: The model's keyword arguments for each micro-batch of this rank.
        world: The ranks of the run.
        is_one_forward: Whether each rank runs all of its tokens of the step in one forward.
    """
    if routing is None or not routing.coefficient:
        return lambda loss: loss
    if is_one_forward:
        step_selected = None
    else:
        step_selected = world.sum(routing.run_and_count_selected(model, inputs, world.device))

    def add_auxiliary(loss: Tensor) -> Tensor:
        if step_selected is None:
            selected = world.sum(routing.count_selected())
        else:
            selected = step_selected
        auxiliary = routing.auxiliary_loss(selected)
        # Gradients are averaged over the ranks of a stage, but the ranks' parts add up.
        return loss + world.stage_size * routing.coefficient * auxiliary

    return add_auxiliary
