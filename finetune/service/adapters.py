"""Adapters that take turns in one model: their values and optimizer states, on the host and on
disk.

A state is a folder that never changes: a PEFT adapter, the optimizer's state beside it, and last
`state.json` with the checksums of both. Every update writes the next one.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from finetune.config.module_names import PEFT_PREFIX, is_adapter, peft_name
from finetune.constants import ADAPTER_NAME
from finetune.distributed.model_parts import (
    find_local_slices,
    gather_whole,
    local_part,
    place_like,
    unwrap,
)
from finetune.distributed.world import RankGroup
from finetune.errors import UserError
from finetune.files.durable import checksum, make_folder, stage_and_rename, write_file
from finetune.models.lora import with_adapters
from finetune.optim.optimizers import complete_state
from finetune.session import Session

WEIGHTS = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """The form of adapter that a client asks for."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True

    def trains(self, name: str) -> bool:
        """Whether the layer that a parameter belongs to is adapted."""
        return self.train_attn if "attn" in name or "attention" in name else self.train_mlp


class Held(NamedTuple):
    """This rank's part of an adapter, on the host."""

    values: list[Tensor]  # in the order of the model's adapter parameters
    moments: list[list[Tensor]]  # of each, those of MOMENTS
    steps: int


class Adapters:
    """The adapters of a session's model, whose own has the rank that is the largest.

    One of a lower rank fills the rest with zeros, which get no gradient: A is 0 where B is. All
    ranks make the same calls.
    """

    def __init__(self, session: Session, folder: Path, kept: int = 16) -> None:
        """`folder`: of the states; `kept`: how many of the latest stay in host memory."""
        self._session = session
        self._folder = folder
        self._kept = kept
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._active: tuple[str | None, AdapterForm] | None = None
        self._steps = 0
        if type(session.optimizer) is not torch.optim.AdamW:
            raise UserError("serve-training: optim: clients ask for AdamW; leave optim out")
        complete_state(session.optimizer)
        transformer = unwrap(session.model)
        self._parameters: dict[str, nn.Parameter] = {
            name: each for name, each in transformer.named_parameters() if is_adapter(name)
        }
        self._layers = [layer for layer in transformer.modules() if hasattr(layer, "lora_A")]
        self._config = transformer.peft_config[ADAPTER_NAME]

    def activate(self, state: str | None, form: AdapterForm) -> None:
        """Puts an adapter into the model: a state, or without one the start that `form` describes.

        Raises `UserError` for a state that is damaged.
        """
        if self._active == (state, form) and state is not None:
            return
        held = self._find(state, form)
        self._active = None
        optimizer_state = self._session.optimizer.state
        with torch.no_grad():
            for parameter, values, held_moments in zip(
                self._parameters.values(), held.values, held.moments, strict=True
            ):
                local_part(parameter).copy_(values)
                for name, moment in zip(MOMENTS, held_moments, strict=True):
                    local_part(optimizer_state[parameter][name]).copy_(moment)
                optimizer_state[parameter]["step"].fill_(held.steps)
        self._steps = held.steps
        for layer in self._layers:
            layer.scaling[ADAPTER_NAME] = self.scale_of(form)
        self._active = (state, form)

    def scale_of(self, form: AdapterForm) -> float:
        """Returns peft's factor of x A B: alpha / rank, under rsLoRA alpha / sqrt(rank)."""
        lora = self._session.recipe.lora
        rank = max(1, form.rank)
        return lora.lora_alpha / (rank**0.5 if lora.use_rslora else rank)

    def read_whole(self, state: str, form: AdapterForm) -> dict[str, Tensor]:
        """Reads an adapter's tensors by parameter name, unsharded on every rank, padded with zeros
        to the model's rank.

        Raises `UserError` for a state that is damaged.
        """
        shards = self._find(state, form).values
        named = zip(self._parameters.items(), shards, strict=True)
        return {
            name: gather_whole(place_like(parameter, shard.to(parameter.device)))
            for (name, parameter), shard in named
        }

    def share_gradients(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Shards whole gradients, by parameter name, like the optimizer's parameters, in order."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        groups = self._session.optimizer.param_groups
        sharded = []
        for parameter in (parameter for group in groups for parameter in group["params"]):
            gradient = whole[names[parameter]]
            shard = gradient[find_local_slices(parameter)].contiguous().to(parameter.device)
            sharded.append(place_like(parameter, shard))
        return sharded

    def count_step(self) -> None:
        """Counts an update, after which the adapter in the model is no stored state any more."""
        self._steps += 1
        self._active = None

    def store(self, state: str, form: AdapterForm, *, with_optimizer: bool = True) -> int:
        """Writes the adapter in the model to disk as a new state, and keeps a copy in host memory.

        All ranks call it.

        Args:
            state: The name of the state's folder, which must be new.
            form: The adapter's form; tensors are cut to its rank.
            with_optimizer: Whether the state has the optimizer's moments; else they become 0.

        Returns:
            The bytes on disk.

        Raises:
            UserError: On all ranks, where it cannot be written.
        """
        if not with_optimizer:
            self._reset_optimizer()
        weights = {
            PEFT_PREFIX + peft_name(name): _cut(_gather(parameter), name, form.rank)
            for name, parameter in self._parameters.items()
        }
        moments = {
            f"{peft_name(name)}.{kind}": _cut(_gather(moment), name, form.rank)
            for name, parameter in self._parameters.items()
            for kind, moment in self._moments_of(parameter)
        }
        target = self._folder / state
        files: dict[str, Callable[[], bytes]] = {
            WEIGHTS: lambda: save(weights, {"format": "pt"}),
            "adapter_config.json": lambda: self._describe(form),
            OPTIMIZER: lambda: save(moments),
        }
        byte_count = RankGroup(self._session.world).on_main(
            lambda: _publish(target, files, {"steps": self._steps, "form": asdict(form)})
        )
        self._active = (state, form)
        self._hold(state, self._copy())
        return int(byte_count)

    def _moments_of(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yields the optimizer's moments of a parameter: (their name in MOMENTS, the tensor)."""
        state = self._session.optimizer.state[parameter]
        return ((name, state[name]) for name in MOMENTS)

    def _reset_optimizer(self) -> None:
        """Sets the optimizer's moments and steps to 0."""
        self._steps = 0
        for parameter in self._parameters.values():
            for _, moment in self._moments_of(parameter):
                local_part(moment).zero_()
            self._session.optimizer.state[parameter]["step"].zero_()

    def _describe(self, form: AdapterForm) -> bytes:
        """The content of adapter_config.json."""
        base = self._session.recipe.model.model_name_or_path
        changes = {"r": form.rank, "base_model_name_or_path": base, "inference_mode": True}
        content = {**self._config.to_dict(), **changes}
        return json.dumps(content, default=_as_json, indent=2).encode()

    def _copy(self) -> Held:
        """Copies this rank's part of the adapter in the model to the host."""
        parameters = self._parameters.values()
        values = [_on_host(parameter) for parameter in parameters]
        moments = [
            [_on_host(moment) for _, moment in self._moments_of(parameter)]
            for parameter in parameters
        ]
        return Held(values, moments, self._steps)

    def _hold(self, state: str, held: Held) -> None:
        """Keeps a state in host memory, and drops those that were used least recently."""
        self._held[state] = held
        while len(self._held) > self._kept:
            self._held.popitem(last=False)

    def _find(self, state: str | None, form: AdapterForm) -> Held:
        if state is None:
            return self._start(form)
        if state not in self._held:
            self._hold(state, self._read(state))
        self._held.move_to_end(state)
        return self._held[state]

    def _start(self, form: AdapterForm) -> Held:
        shapes = {
            name: torch.Size(_cut_shape(each.shape, name, form.rank))
            for name, each in self._parameters.items()
        }
        make = with_adapters(_no_base, shapes, form.seed)
        full_tensors = {
            name: make(name, tuple(map(slice, shape)))
            for name, shape in shapes.items()
            if form.rank and form.trains(name)
        }
        return self._share(full_tensors, {}, 0)

    def _read(self, state: str) -> Held:
        folder = self._folder / state
        RankGroup(self._session.world).on_main(lambda: _verify(folder))
        facts = json.loads((folder / STATE).read_text())
        stored = load_file(folder / WEIGHTS)
        values = {name: stored[PEFT_PREFIX + peft_name(name)] for name in self._parameters}
        return self._share(values, load_file(folder / OPTIMIZER), facts["steps"])

    def _share(
        self, values: Mapping[str, Tensor], moments: Mapping[str, Tensor], steps: int
    ) -> Held:
        """Shards unsharded tensors as the model's adapter is; what is missing becomes 0."""
        return Held(
            [_fill(each, values.get(name)) for name, each in self._parameters.items()],
            [
                [_fill(each, moments.get(f"{peft_name(name)}.{moment}")) for moment in MOMENTS]
                for name, each in self._parameters.items()
            ],
            steps,
        )


def _gather(tensor: Tensor) -> Tensor:
    """Gathers a tensor that may be sharded, on the host."""
    return gather_whole(tensor).detach().cpu()


def _on_host(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().to("cpu", copy=True)


def _cut_shape(shape: torch.Size, name: str, rank: int) -> tuple[int, int]:
    return (rank, shape[1]) if ".lora_A." in name else (shape[0], rank)


def _cut(tensor: Tensor, name: str, rank: int) -> Tensor:
    rows, columns = _cut_shape(tensor.shape, name, rank)
    return tensor[:rows, :columns].contiguous()


def _fill(like: Tensor, full: Tensor | None) -> Tensor:
    """This rank's shard of `full`, padded with zeros to the shape of `like`; zeros where None."""
    filled = torch.zeros(like.shape)
    if full is not None:
        filled[tuple(map(slice, full.shape))] = full
    return filled[find_local_slices(like)].clone()


def _no_base(name: str, _: object) -> Tensor:
    raise AssertionError(f"{name}: not an adapter's")


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def _publish(
    target: Path, files: Mapping[str, Callable[[], bytes]], facts: Mapping[str, Any]
) -> int:
    """Writes a state's folder whole; returns its bytes."""
    make_folder(target.parent)
    with stage_and_rename(target, target.with_name(f".{target.name}.writing")) as folder:
        written = {name: write_file(folder / name, [make()]) for name, make in files.items()}
        content = json.dumps({**facts, "files": written}).encode()
        write_file(folder / STATE, [content])
    return sum(int(str(each["size"])) for each in written.values())


def _verify(folder: Path) -> None:
    """Raises `UserError` for a state that is not what was written."""
    try:
        facts = json.loads((folder / STATE).read_text())
        damaged = [name for name, sums in facts["files"].items() if checksum(folder / name) != sums]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read: {error}; load another checkpoint") from None
    if damaged:
        raise UserError(f"{folder / damaged[0]}: is damaged; load another checkpoint")
