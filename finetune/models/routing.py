"""What the routers of a mixture choose, counted while it trains, and the auxiliary loss that keeps
them balanced.

The loss is that of Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, as transformers has it: over
all layers together.

    auxiliary = experts * sum over experts of share_e * probability_e

share_e is the number of tokens that chose expert e, probability_e the sum of its probabilities,
both over the tokens of all ranks, micro-batches and layers of the step, divided by their number.
Padding is no token.
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

ATTRIBUTE = "expert_routing"  # of a transformers model


SEEN = "seen_output"  # of a router, between its forward and the end of the model's


def install_routing(model: Any, coefficient: float | None) -> None:
    """Counts what the routers of `model` choose while it trains; before sharding.

    No effect on a dense model.

    `coefficient`: of the auxiliary loss; None leaves it to the model's config, where it is on with
    `output_router_logits`. That the family has such a loss, the rules have asked. Raises
    `UserError` where a coefficient is asked for and no router is found.
    """
    config = model.config.get_text_config()
    routers = _routers(model)
    own = None
    if getattr(config, "output_router_logits", False):
        own = getattr(config, "router_aux_loss_coef", None)
    chosen = own if coefficient is None else coefficient
    if coefficient and not routers:  # of a model's own code, which the rules cannot ask
        raise UserError(
            f"router_aux_loss_coef: the routers of {type(model).__name__} are not found; remove "
            "the key"
        )
    if routers:
        setattr(model, ATTRIBUTE, Routing(model, routers, config, chosen or 0.0))


def find_routing(model: Any) -> "Routing | None":
    """The routing of an unwrapped transformers model; None for a dense one."""
    return getattr(model, ATTRIBUTE, None)


class Routing:
    """The choices of one model's routers, and their auxiliary loss."""

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[tuple[nn.Module, int]],
        config: Any,
        coefficient: float,
    ) -> None:
        self.coefficient = coefficient
        self._routers = routers
        self.layers = len(routers)
        self.experts = count_experts(config.to_dict())
        self._chosen_per_token = count_chosen(config.to_dict()) or 1
        # [layers, experts], tokens since the last line of metrics
        self._counts: Tensor | None = None
        self._auxiliary: Tensor | None = None  # this rank's part of the auxiliary losses since then
        self._steps = 0
        # between the beginning and the end of a training forward: recomputed layers do not count
        self._is_open = False
        self._is_counted = True
        self._device = torch.device("cpu")
        self._mask: Tensor | None = None
        self._logits: dict[int, Tensor] = {}  # of the last forward, by layer
        # Of `replay`: int16[tokens, layers, chosen], what the last forward was given to choose; and
        # what is chosen until `take_choices`, by layer, where it is recorded.
        self._replayed: Tensor | None = None
        self._choices: list[list[Tensor]] | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._count_forward)
        for router, _ in routers:
            router.register_forward_hook(self._keep_output)

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._is_open = model.training and "labels" in kwargs
        mask = kwargs.get("token_mask")
        self._mask = None if mask is None else mask.flatten()
        replayed = kwargs.get("replayed_experts")
        self._replayed = None if replayed is None else replayed.flatten(0, 1)
        self._logits.clear()
        for router, _ in self._routers:
            vars(router).pop(SEEN, None)

    def replay(self) -> None:
        """Makes the routers take the experts that a forward is given as `replayed_experts` (R3,
        arXiv:2510.11370), also where it is recomputed, and makes them able to record theirs.

        Their weights are those of the logits of this forward at these experts, and have gradients.
        """
        for layer, (router, _) in enumerate(self._routers):
            router.forward = self._wrap(layer, router)

    def _wrap(self, layer: int, router: nn.Module) -> Callable[..., Any]:
        plain = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = None if self._replayed is None else self._replayed[:, layer]
            with GivenChoices([given]) as choice:
                output = plain(*args, **kwargs)
            if len(choice.chosen) != 1 or choice.chosen[0].dim() != 2:
                raise UserError(
                    f"routing_replay: {type(router).__name__} does not choose a token's experts as "
                    "the highest of one row of scores; remove the key"
                )
            if self._choices is not None:
                self._choices[layer].append(choice.chosen[0].to(torch.int16))
            return output

        return forward

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The block in which what the routers choose is recorded."""
        self._choices = [[] for _ in self._routers]
        try:
            yield
        finally:
            self._choices = None

    def take_choices(self) -> Tensor:
        """int16[tokens, layers, chosen]: of all forwards recorded since the last call."""
        assert self._choices is not None
        taken = torch.stack([torch.cat(of_layer) for of_layer in self._choices], 1)
        self._choices = [[] for _ in self._routers]
        return taken

    def _keep_output(self, router: nn.Module, _inputs: Any, output: Any) -> None:
        # A compiled layer is one graph, in the forward and where it is recomputed; that one ends
        # before it leaves this.
        if self._is_open or torch.compiler.is_compiling():
            setattr(router, SEEN, output)

    def _count_forward(self, _model: nn.Module, _args: Any, result: Tensor) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._device = result.device
        if self._is_counted and self._counts is None:
            self._counts = torch.zeros(self.layers, self.experts, device=self._device)
        for layer, (router, index) in enumerate(self._routers):
            output = vars(router).pop(SEEN, None)
            if output is None:  # a layer of another stage
                continue
            logits = (output if isinstance(output, tuple) else (output,))[index].flatten(0, -2)
            if self.coefficient:
                self._logits[layer] = logits
            if self._is_counted:
                assert self._counts is not None
                self._counts[layer] += self._count(_chosen(output, logits, self._chosen_per_token))

    def _count(self, chosen: Tensor) -> Tensor:
        """Tokens for each expert, of `chosen` [tokens, experts of a token]: float32[experts]."""
        ones = torch.ones(chosen.shape, device=chosen.device)
        if self._mask is not None:
            ones = ones * self._mask[:, None]
        # the last: none of them (Zaya), or one that passes its input on (LongCat Flash)
        counts = torch.zeros(self.experts + 1, device=chosen.device)
        indices = chosen.flatten().clamp(max=self.experts)
        return counts.scatter_add_(0, indices, ones.flatten())[:-1]

    def selected(self) -> Tensor:
        """Tokens for each expert in the last forward, over all layers, by their probabilities
        alone: float32[experts].
        """
        chosen = (
            logits.detach().softmax(-1).topk(self._chosen_per_token).indices
            for logits in self._logits.values()
        )
        # where a rank of a pipeline has dense layers alone
        none = torch.zeros(self.experts, device=self._device)
        return sum((self._count(each) for each in chosen), none)

    def count_selected(
        self, model: nn.Module, inputs: Iterable[dict[str, Any]], device: torch.device
    ) -> Tensor:
        """`selected` over the forwards of `inputs`, without gradients; no random state is
        changed.
        """
        self._is_counted = False
        total = torch.zeros(self.experts, device=device)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            ):
                for each in inputs:
                    model(**each | {"trained_positions": nothing})
                    total += self.selected()
        finally:
            self._is_counted = True
        return total

    def auxiliary_loss(self, selected: Tensor, tokens: int) -> Tensor:
        """Computes the last forward's part of the step's auxiliary loss, 0-dim; the caller
        multiplies it by the coefficient.

        Args:
            selected: float32[experts], tokens for each expert over the whole step and all layers.
            tokens: Of the whole step.
        """
        total = torch.zeros(self.experts, device=selected.device)
        for logits in self._logits.values():
            probabilities = logits.float().softmax(-1)
            if self._mask is not None:
                probabilities = probabilities * self._mask[:, None]
            total = total + probabilities.sum(0)
        routed = max(1, tokens * self.layers)  # tokens, once for each layer
        loss = self.experts * (selected / routed * total / routed).sum()
        if self._auxiliary is None:
            self._auxiliary = loss.detach()
        else:
            self._auxiliary = self._auxiliary + loss.detach()
        return loss

    def end_step(self) -> None:
        """Counts an optimizer step, for the mean of the auxiliary loss."""
        self._logits.clear()
        self._steps += 1

    def take_metrics(self, world: World) -> dict[str, Any]:
        """Returns the metrics of the steps since the last call, over all ranks. All ranks call it.

        The largest share of a layer's tokens that one expert received (1 / experts where all are
        alike), and the share of its experts that received none; then the worst layer's share of
        either.
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
    """In this block the highest of some scores are where they are said to be.

    A router takes a token's experts by `topk`, sparse attention its keys.
    """

    def __init__(self, given: Sequence[Tensor | None] = ()) -> None:
        """
        Args:
            given: For each call of `topk`, int[..., chosen] along the last dimension; where one is
                negative, None or missing, the scores decide.
        """
        super().__init__()
        self._given = iter(given)
        self.chosen: list[Tensor] = []  # of each choice, int64[..., chosen]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        highest = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk):
            return highest
        chosen = highest.indices
        given = next(self._given, None)
        if given is None:
            self.chosen.append(chosen)
            return highest
        chosen = torch.where(given < 0, chosen, given.long())
        self.chosen.append(chosen)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def _routers(model: Any) -> list[tuple[nn.Module, int]]:
    """The routers of `model`, layer by layer, each with the place of its logits in its output, as
    transformers records them for `output_router_logits`.
    """
    recorded = getattr(model, "_can_record_outputs", None) or {}
    trunk = trunk_of(model)
    recorder = recorded.get("router_logits") or (
        getattr(trunk, "_can_record_outputs", None) or {}
    ).get("router_logits")
    target: Any = getattr(recorder, "target_class", recorder)
    if not isinstance(target, type):
        return []
    modules: list[Any] = [module for module in model.modules() if type(module) is target]
    return [(module, getattr(recorder, "index", 0)) for module in modules]


def _chosen(output: Any, logits: Tensor, count: int) -> Tensor:
    """The experts of each token, int64[tokens, count]: the router's own choice where it returns
    one.
    """
    outputs = output if isinstance(output, tuple) else ()
    own = [
        each
        for each in outputs
        if isinstance(each, Tensor) and each.dtype == torch.int64 and each.dim() == 2
    ]
    return own[-1] if own else logits.detach().topk(count).indices


def auxiliary_loss_of_step(
    model: nn.Module,
    routing: Routing | None,
    inputs: Iterable[dict[str, Any]],
    tokens: int,
    world: World,
    *,
    is_one_forward: bool,
) -> Callable[[Tensor], Tensor]:
    """Returns a function that adds a mixture's auxiliary loss to the loss of the latest forward.

    Without an auxiliary loss, the function returns the loss unchanged.

    The auxiliary loss multiplies what the whole step selects with the probabilities of each token.
    With several micro-batches the first backward needs the selection of the last, hence a forward
    of each without gradients.

    Args:
        model: The mixture.
        routing: Its own.
        inputs: The model's keyword arguments for each micro-batch of this rank.
        tokens: Of the step, over all ranks.
        world: The ranks of the run.
        is_one_forward: Whether this rank's tokens of the step are selected in one forward.
    """
    if routing is None or not routing.coefficient:
        return lambda loss: loss
    used: Routing = routing
    if is_one_forward:
        of_step = None
    else:
        of_step = world.sum(used.count_selected(model, inputs, world.device))

    def add(loss: Tensor) -> Tensor:
        if of_step is None:
            selected = world.sum(used.selected())
        else:
            selected = of_step
        return loss + world.stage_size * used.coefficient * used.auxiliary_loss(selected, tokens)

    return add
