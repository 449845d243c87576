"""Adapters that take turns in one model. The others wait on the host and on disk.

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

    rank: int  # 0: an adapter without effect, which stands for the base model
    seed: int  # of the first values
    train_mlp: bool = True
    train_attn: bool = True

    def trains(self, name: str) -> bool:
        """Returns whether a layer is trained, by the name of the layer's parameter.

        Every layer that is not part of the attention counts as a part of the MLP.
        """
        is_attention = "attn" in name or "attention" in name
        return self.train_attn if is_attention else self.train_mlp


class AdapterShard(NamedTuple):
    """This rank's shard of an adapter and of the optimizer's state, on the host."""

    values: list[Tensor]  # in the order of the model's adapter parameters
    moments: list[list[Tensor]]  # of each parameter, in the order of MOMENTS
    steps: int  # the optimizer's steps since the moments were 0


class Adapters:
    """The adapters that take turns in a session's model. All ranks make the same calls.

    The model has one adapter, whose rank is the largest that clients may ask for. An adapter of a
    lower rank is padded with zeros. These zeros get no gradient: the gradient of a padded row of A
    is a product with a padded column of B, and the other way round.
    """

    def __init__(self, session: Session, folder: Path, most_on_host: int = 16) -> None:
        """Prepares the session's model for adapters.

        Args:
            session: A session whose model has an adapter.
            folder: The folder of the states.
            most_on_host: The number of states that stay in host memory.

        Raises:
            UserError: The session's optimizer is not AdamW.
        """
        self._session = session
        self._folder = folder
        self._most_on_host = most_on_host
        # state -> shard, the least recently used first
        self._shards: OrderedDict[str, AdapterShard] = OrderedDict()
        # the state and form of the adapter in the model; None: no stored state is in it
        self._active: tuple[str | None, AdapterForm] | None = None
        self._steps = 0  # of the adapter in the model
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
        """Loads a state into the model and the optimizer.

        Args:
            state: The state; None: a new adapter is initialized.
            form: The adapter's form.

        Raises:
            UserError: The state is damaged.
        """
        if self._active == (state, form) and state is not None:
            return
        shard = self._load(state, form)
        self._active = None  # until every tensor is copied
        optimizer_state = self._session.optimizer.state
        with torch.no_grad():
            for parameter, values, moments in zip(
                self._parameters.values(), shard.values, shard.moments, strict=True
            ):
                local_part(parameter).copy_(values)
                for name, moment in zip(MOMENTS, moments, strict=True):
                    local_part(optimizer_state[parameter][name]).copy_(moment)
                optimizer_state[parameter]["step"].fill_(shard.steps)
        self._steps = shard.steps
        for layer in self._layers:
            layer.scaling[ADAPTER_NAME] = self.compute_scale(form)
        self._active = (state, form)

    def compute_scale(self, form: AdapterForm) -> float:
        """Returns the factor by which peft scales an adapter's output.

        It is alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        """
        lora = self._session.recipe.lora
        rank = max(1, form.rank)  # an adapter of rank 0 is all zeros: any factor will do
        divisor = rank**0.5 if lora.use_rslora else rank
        return lora.lora_alpha / divisor

    def read_whole(self, state: str, form: AdapterForm) -> dict[str, Tensor]:
        """Returns an adapter's tensors by parameter name, unsharded on every rank.

        They are padded with zeros to the rank of the model's adapter. The model is not changed.

        Raises `UserError` for a damaged state.
        """
        values = self._load(state, form).values
        unsharded = {}
        for (name, parameter), shard in zip(self._parameters.items(), values, strict=True):
            unsharded[name] = gather_whole(place_like(parameter, shard.to(parameter.device)))
        return unsharded

    def shard_gradients(self, unsharded: Mapping[str, Tensor]) -> list[Tensor]:
        """Shards gradients like the parameters.

        Args:
            unsharded: Parameter name -> gradient. Every rank has all of it.

        Returns:
            The gradients in the order of the optimizer's parameters.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}
        groups = self._session.optimizer.param_groups
        sharded = []
        for parameter in chain.from_iterable(group["params"] for group in groups):
            gradient = unsharded[names[parameter]]
            shard = gradient[find_local_slices(parameter)].contiguous().to(parameter.device)
            sharded.append(place_like(parameter, shard))
        return sharded

    def count_step(self) -> None:
        """Counts an update of the adapter in the model, which no longer equals a stored state."""
        self._steps += 1
        self._active = None

    def store(self, state: str, form: AdapterForm, *, with_optimizer: bool = True) -> int:
        """Writes the adapter in the model to disk as a new state, and keeps a copy in host memory.

        All ranks call it.

        Args:
            state: The name of the state's folder, which must be new.
            form: The adapter's form. The tensors on disk are cut to the form's rank.
            with_optimizer: False sets the optimizer's moments and steps to 0 first.

        Returns:
            The size of the state's weights, config and moments in bytes.

        Raises:
            UserError: The state cannot be written. All ranks raise it.
        """
        if not with_optimizer:
            # If the write fails, the model no longer has the moments of the state that was active.
            self._active = None
            self._reset_optimizer()
        weights = {}
        moments = {}
        for name, parameter in self._parameters.items():
            weights[PEFT_PREFIX + peft_name(name)] = _cut(_gather(parameter), name, form.rank)
            for kind, moment in self._moments_of(parameter):
                moments[f"{peft_name(name)}.{kind}"] = _cut(_gather(moment), name, form.rank)
        target = self._folder / state
        # functions, because only rank 0 needs the bytes
        files: dict[str, Callable[[], bytes]] = {
            WEIGHTS: lambda: save(weights, {"format": "pt"}),
            "adapter_config.json": lambda: self._make_config(form),
            OPTIMIZER: lambda: save(moments),
        }
        byte_count = RankGroup(self._session.world).on_main(
            lambda: _write_state(target, files, {"steps": self._steps, "form": asdict(form)})
        )
        self._active = (state, form)
        self._keep_on_host(state, self._copy_to_host())
        return int(byte_count)

    def _moments_of(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yields the optimizer's moments of a parameter: (name in MOMENTS, tensor)."""
        state = self._session.optimizer.state[parameter]
        return ((name, state[name]) for name in MOMENTS)

    def _reset_optimizer(self) -> None:
        """Sets the optimizer's moments and step counts to 0, as before the first update."""
        self._steps = 0
        for parameter in self._parameters.values():
            for _, moment in self._moments_of(parameter):
                local_part(moment).zero_()
            self._session.optimizer.state[parameter]["step"].zero_()

    def _make_config(self, form: AdapterForm) -> bytes:
        """Makes the content of adapter_config.json, by which peft loads the state's adapter."""
        base = self._session.recipe.model.model_name_or_path
        changes = {"r": form.rank, "base_model_name_or_path": base, "inference_mode": True}
        content = {**self._config.to_dict(), **changes}
        return json.dumps(content, default=_as_json, indent=2).encode()

    def _copy_to_host(self) -> AdapterShard:
        """Copies this rank's shard of the adapter in the model to the host."""
        parameters = self._parameters.values()
        values = [_copy_shard(parameter) for parameter in parameters]
        moments = [
            [_copy_shard(moment) for _, moment in self._moments_of(parameter)]
            for parameter in parameters
        ]
        return AdapterShard(values, moments, self._steps)

    def _keep_on_host(self, state: str, shard: AdapterShard) -> None:
        """Keeps a state in host memory; drops the least recently used states above the limit."""
        self._shards[state] = shard
        while len(self._shards) > self._most_on_host:
            self._shards.popitem(last=False)

    def _load(self, state: str | None, form: AdapterForm) -> AdapterShard:
        """Returns this rank's shard of a state, from host memory or else from disk.

        If `state` is None, returns the shard of a new adapter of this form.
        """
        if state is None:
            return self._initialize(form)
        if state not in self._shards:
            self._keep_on_host(state, self._read(state))
        self._shards.move_to_end(state)
        return self._shards[state]

    def _initialize(self, form: AdapterForm) -> AdapterShard:
        """Initializes a new adapter. Layers that are not trained get zeros for A and B."""
        shapes = {}
        for name, parameter in self._parameters.items():
            shapes[name] = torch.Size(_cut_shape(parameter.shape, name, form.rank))
        initialize = with_adapters(_no_base, shapes, form.seed)
        full_tensors = {}
        for name, shape in shapes.items():
            if form.rank and form.trains(name):
                full_tensors[name] = initialize(name, tuple(map(slice, shape)))
        return self._shard(full_tensors, {}, 0)

    def _read(self, state: str) -> AdapterShard:
        """Reads this rank's shard of a state from disk. Raises `UserError` for damaged files."""
        folder = self._folder / state
        RankGroup(self._session.world).on_main(lambda: _verify(folder))
        facts = json.loads((folder / STATE).read_text())
        stored = load_file(folder / WEIGHTS)
        values = {name: stored[PEFT_PREFIX + peft_name(name)] for name in self._parameters}
        return self._shard(values, load_file(folder / OPTIMIZER), facts["steps"])

    def _shard(
        self, values: Mapping[str, Tensor], moments: Mapping[str, Tensor], steps: int
    ) -> AdapterShard:
        """Returns this rank's shard of unsharded tensors. Missing tensors become zeros.

        Args:
            values: Parameter name -> values.
            moments: "{peft's parameter name}.{name in MOMENTS}" -> moments.
            steps: The optimizer's steps.
        """
        shard = AdapterShard([], [], steps)
        for name, parameter in self._parameters.items():
            shard.values.append(_pad_and_shard(values.get(name), parameter))
            names = [f"{peft_name(name)}.{moment}" for moment in MOMENTS]
            shard.moments.append([_pad_and_shard(moments.get(each), parameter) for each in names])
        return shard


def _gather(tensor: Tensor) -> Tensor:
    """Gathers a tensor that may be sharded, and copies it to the host. All ranks call it."""
    return gather_whole(tensor).detach().cpu()


def _copy_shard(tensor: Tensor) -> Tensor:
    """Copies this rank's shard of a tensor to the host."""
    return local_part(tensor).detach().to("cpu", copy=True)


def _cut_shape(shape: torch.Size, name: str, rank: int) -> tuple[int, int]:
    """Returns the shape of A [rank, in] or B [out, rank] at a lower rank."""
    return (rank, shape[1]) if ".lora_A." in name else (shape[0], rank)


def _cut(tensor: Tensor, name: str, rank: int) -> Tensor:
    """Cuts A or B, or the moments of one of them, to a lower rank. `name`: of the parameter."""
    rows, columns = _cut_shape(tensor.shape, name, rank)
    return tensor[:rows, :columns].contiguous()


def _pad_and_shard(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Pads a tensor with zeros to the shape of `like`; returns this rank's shard.

    tensor: A matrix, which may have fewer rows or columns than `like`; None: zeros.
    """
    padded = torch.zeros(like.shape)
    if tensor is not None:
        padded[tuple(map(slice, tensor.shape))] = tensor
    return padded[find_local_slices(like)].clone()


def _no_base(name: str, _: object) -> Tensor:
    """Stands for the base's values, which nothing asks for: only adapters are initialized here."""
    raise AssertionError(f"{name}: not an adapter's")


def _as_json(value: Any) -> Any:
    """Makes a value of peft's config JSON: a set becomes a sorted list, anything else a text."""
    return sorted(value) if isinstance(value, set) else str(value)


def _write_state(
    target: Path, files: Mapping[str, Callable[[], bytes]], facts: Mapping[str, Any]
) -> int:
    """Writes a state's folder, which appears complete or not at all.

    Args:
        target: The folder.
        files: The name of a file -> makes the content.
        facts: What `state.json` says beside the checksums.

    Returns:
        The size of `files` in bytes.
    """
    make_folder(target.parent)
    with stage_and_rename(target, target.with_name(f".{target.name}.writing")) as folder:
        checksums = {name: write_file(folder / name, [make()]) for name, make in files.items()}
        content = json.dumps({**facts, "files": checksums}).encode()
        write_file(folder / STATE, [content])
    return sum(int(str(each["size"])) for each in checksums.values())


def _verify(folder: Path) -> None:
    """Raises `UserError` if a file of a state is missing or differs from the checksum."""
    try:
        facts = json.loads((folder / STATE).read_text())
        damaged = [name for name, sums in facts["files"].items() if checksum(folder / name) != sums]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read: {error}; load another checkpoint") from None
    if damaged:
        raise UserError(f"{folder / damaged[0]}: is damaged; load another checkpoint")
