"""Adapters that take turns in one model. Their values and moments are kept on the host and on disk.

A state is a folder that never changes. It has a PEFT adapter, the optimizer's moments, and
`state.json` with the checksums of these files. Every update writes a new state.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from finetune.config.module_names import PEFT_PREFIX, is_adapter, peft_name
from finetune.constants import ADAPTER_NAME, Fields
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
        """Returns whether the layer of a parameter is trained."""
        is_attention = "attn" in name or "attention" in name
        return self.train_attn if is_attention else self.train_mlp


class Held(NamedTuple):
    """This rank's part of an adapter, on the host."""

    values: list[Tensor]  # in the order of the model's adapter parameters
    moments: list[list[Tensor]]  # of each parameter, in the order of MOMENTS
    steps: int  # the optimizer's


class Adapters:
    """The adapters that take turns in a session's model. All ranks make the same calls.

    The model's adapter has the largest rank. An adapter of a lower rank is padded with zeros, which
    get no gradient, because A and B are 0 at the same places.
    """

    def __init__(self, session: Session, folder: Path, kept: int = 16) -> None:
        """Prepares the session's model for adapters.

        Args:
            session: A session whose model has an adapter.
            folder: The folder of the states.
            kept: The number of states that stay in host memory.

        Raises:
            UserError: The session's optimizer is not AdamW.
        """
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
        """Puts a state into the model, or without one a new adapter of this form.

        Raises `UserError` for a damaged state.
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
        """Returns the factor of x A B in peft: alpha / rank, or alpha / sqrt(rank) by rsLoRA."""
        lora = self._session.recipe.lora
        rank = max(1, form.rank)
        divisor = rank**0.5 if lora.use_rslora else rank
        return lora.lora_alpha / divisor

    def read_whole(self, state: str, form: AdapterForm) -> dict[str, Tensor]:
        """Returns an adapter's tensors by parameter name, unsharded on every rank.

        They are padded with zeros to the model's rank. Raises `UserError` for a damaged state.
        """
        shards = self._find(state, form).values
        whole = {}
        for (name, parameter), shard in zip(self._parameters.items(), shards, strict=True):
            whole[name] = gather_whole(place_like(parameter, shard.to(parameter.device)))
        return whole

    def share_gradients(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Shards unsharded gradients like the parameters; returns them in the optimizer's order.

        whole: Parameter name -> gradient.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}
        groups = self._session.optimizer.param_groups
        sharded = []
        for parameter in chain.from_iterable(group["params"] for group in groups):
            gradient = whole[names[parameter]]
            shard = gradient[find_local_slices(parameter)].contiguous().to(parameter.device)
            sharded.append(place_like(parameter, shard))
        return sharded

    def count_step(self) -> None:
        """Counts an update. The adapter in the model is then no stored state."""
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
        weights = {}
        moments = {}
        for name, parameter in self._parameters.items():
            weights[PEFT_PREFIX + peft_name(name)] = _cut(_gather(parameter), name, form.rank)
            for kind, moment in self._moments_of(parameter):
                moments[f"{peft_name(name)}.{kind}"] = _cut(_gather(moment), name, form.rank)
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
        """Returns the content of adapter_config.json."""
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
        """Keeps a state in host memory; drops the least recently used states above the limit."""
        self._held[state] = held
        while len(self._held) > self._kept:
            self._held.popitem(last=False)

    def _find(self, state: str | None, form: AdapterForm) -> Held:
        """Returns this rank's part of a state, or without one of a new adapter."""
        if state is None:
            return self._start(form)
        if state not in self._held:
            self._hold(state, self._read(state))
        self._held.move_to_end(state)
        return self._held[state]

    def _start(self, form: AdapterForm) -> Held:
        """Initializes a new adapter; layers that are not trained get zeros."""
        shapes = {}
        for name, parameter in self._parameters.items():
            shapes[name] = torch.Size(_cut_shape(parameter.shape, name, form.rank))
        initialize = with_adapters(_no_base, shapes, form.seed)
        full_tensors = {}
        for name, shape in shapes.items():
            if form.rank and form.trains(name):
                full_tensors[name] = initialize(name, tuple(map(slice, shape)))
        return self._share(full_tensors, {}, 0)

    def _read(self, state: str) -> Held:
        """Reads a state from disk. Raises `UserError` where it is damaged."""
        folder = self._folder / state
        RankGroup(self._session.world).on_main(lambda: _verify(folder))
        facts = json.loads((folder / STATE).read_text())
        stored = load_file(folder / WEIGHTS)
        values = {name: stored[PEFT_PREFIX + peft_name(name)] for name in self._parameters}
        return self._share(values, load_file(folder / OPTIMIZER), facts["steps"])

    def _share(
        self, values: Mapping[str, Tensor], moments: Mapping[str, Tensor], steps: int
    ) -> Held:
        """Returns this rank's shards of unsharded tensors; missing ones become 0."""
        held = Held([], [], steps)
        for name, parameter in self._parameters.items():
            held.values.append(_fill(parameter, values.get(name)))
            names = [f"{peft_name(name)}.{moment}" for moment in MOMENTS]
            held.moments.append([_fill(parameter, moments.get(each)) for each in names])
        return held


def _gather(tensor: Tensor) -> Tensor:
    """Gathers a tensor, which may be sharded, to the host."""
    return gather_whole(tensor).detach().cpu()


def _on_host(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().to("cpu", copy=True)


def _cut_shape(shape: torch.Size, name: str, rank: int) -> tuple[int, int]:
    return (rank, shape[1]) if ".lora_A." in name else (shape[0], rank)


def _cut(tensor: Tensor, name: str, rank: int) -> Tensor:
    rows, columns = _cut_shape(tensor.shape, name, rank)
    return tensor[:rows, :columns].contiguous()


def _fill(like: Tensor, full: Tensor | None) -> Tensor:
    """Returns this rank's shard of `full`, padded with zeros to the shape of `like`; None is 0."""
    filled = torch.zeros(like.shape)
    if full is not None:
        filled[tuple(map(slice, full.shape))] = full
    return filled[find_local_slices(like)].clone()


def _no_base(name: str, _: object) -> Tensor:
    raise AssertionError(f"{name}: not an adapter's")


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def _publish(target: Path, files: Mapping[str, Callable[[], bytes]], facts: Fields) -> int:
    """Writes a state's folder, which appears complete or not at all; returns its size in bytes."""
    make_folder(target.parent)
    with stage_and_rename(target, target.with_name(f".{target.name}.writing")) as folder:
        written = {name: write_file(folder / name, [make()]) for name, make in files.items()}
        content = json.dumps({**facts, "files": written}).encode()
        write_file(folder / STATE, [content])
    return sum(int(str(each["size"])) for each in written.values())


def _verify(folder: Path) -> None:
    """Raises `UserError` for a state whose files differ from their checksums."""
    try:
        facts = json.loads((folder / STATE).read_text())
        damaged = [name for name, sums in facts["files"].items() if checksum(folder / name) != sums]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read: {error}; load another checkpoint") from None
    if damaged:
        raise UserError(f"{folder / damaged[0]}: is damaged; load another checkpoint")
