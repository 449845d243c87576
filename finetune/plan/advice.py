"""Whether a run fits the device, and if not, the cheapest changes that make it fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import gcd, prod
from typing import Any

from finetune.config.layout import DIVISIONS, UNDIVIDED
from finetune.config.optimization import list_smaller
from finetune.constants import Fields, Record
from finetune.plan.peaks import find_peak
from finetune.plan.run_spec import RunSpec, plan_disk, plan_host

CONFIG_KEY = "accelerate_config="
A_FOLDER = "A_FOLDER_ON_NVME"  # for the user to fill in
MIN_ROW_TOKENS = 512  # rows are not halved below this
GROUP_SIZES = (2, 4, 8, 16, 32, 64)  # ranks that divide what one rank had
ROW_DIVIDING_RANKS = 8  # in accelerate_configs/fsdp_sequence_parallel.yaml


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `text` is appended to the command, or set in the Accelerate file."""

    text: str
    cost: str
    apply: Callable[[RunSpec], RunSpec]
    is_in_file: bool = False

    @property
    def is_in_recipe(self) -> bool:
        """Whether the change is of keys of the recipe alone, with values that suit every
        machine.
        """
        return not self.is_in_file and A_FOLDER not in self.text

    @property
    def accelerate_config(self) -> str | None:
        """The shipped Accelerate file that it takes instead of the run's own."""
        words = self.text.split()
        return next(
            (word.removeprefix(CONFIG_KEY) for word in words if word.startswith(CONFIG_KEY)), None
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a machine has; None where that is not known, and nothing is compared."""

    device: int | None  # of each GPU, or of the machine where the CPU computes
    host: int | None = None  # a node's memory
    disk: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether nothing is left out."""
        return None not in (self.device, self.host, self.disk)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of each part of a `Room` that a run needs."""

    device: int
    host: int
    disk: int
    is_on_cpu: bool = False  # the CPU computes

    def fits_memory(self, room: Room) -> bool:
        """Whether the memory that is known is enough."""
        return self.device <= (room.device or self.device) and self.host <= (room.host or self.host)

    def fits(self, room: Room) -> bool:
        """Whether all that is known is enough."""
        return self.fits_memory(room) and self.disk <= (room.disk or self.disk)


def count_need(spec: RunSpec) -> Need:
    """Returns the bytes that the run needs of a GPU, of a node's memory, and of the disk."""
    peak = find_peak(spec).total
    disk = plan_disk(spec)
    return Need(peak, plan_host(spec, peak).total, disk.total, is_on_cpu=spec.device == "cpu")


NeedAfter = Callable[[Sequence[Change]], Need]


def is_supported(changed: RunSpec, asked: RunSpec) -> bool:
    """Whether the run `asked` for could start as `changed`: no rule refuses it that did not refuse
    `asked`.
    """
    known = {problem.rule for problem in asked.find_problems()}
    return all(problem.is_note or problem.rule in known for problem in changed.find_problems())


def list_changes(spec: RunSpec) -> Iterator[Change]:
    """Lists the changes that the rules allow, the cheapest first: those that cost little time,
    those that cost much, those that train fewer parameters.
    """
    return (change for change in _list_candidates(spec) if is_supported(change.apply(spec), spec))


def apply_changes(spec: RunSpec, changes: Iterable[Change]) -> tuple[RunSpec, list[Change]]:
    """`spec` with one change after another, and the changes that cannot be combined with those
    before them.
    """
    left_out = []
    for change in changes:
        changed = change.apply(spec)
        if is_supported(changed, spec):
            spec = changed
        else:
            left_out.append(change)
    return spec, left_out


def describe_changes(changes: Sequence[Change], source: str, *, has_config: bool) -> list[str]:
    """Describes each change as it is made: appended to the command, or in an Accelerate file.

    Args:
        changes: What to describe.
        source: The run's Accelerate file, for changes in a file where none of `changes` names
            another.
        has_config: The command names its Accelerate file by --config, which overrides the recipe's
            key.
    """
    file = next(
        (change.accelerate_config for change in reversed(changes) if change.accelerate_config),
        source,
    )
    key = "--config " if has_config else CONFIG_KEY
    return [
        f"in {file}: {change.text}" if change.is_in_file else change.text.replace(CONFIG_KEY, key)
        for change in changes
    ]


def _list_candidates(spec: RunSpec) -> Iterator[Change]:
    recipe = spec.recipe

    def optimizers(with_package: bool) -> Iterator[Change]:
        for name, cost in list_smaller(
            recipe.optimization.optim, with_package=with_package
        ).items():
            yield Change(f"optim={name}", cost, _set_keys("optimization", optim=name))

    if spec.rows > 1:
        rows = spec.global_batch_size
        if recipe.batch.global_batch_size:
            keep = ""
        else:
            keep = f" global_batch_size={rows}"
        batch = {
            "per_device_train_batch_size": 1,
            "global_batch_size": rows,
            "gradient_accumulation_steps": None,
        }
        yield Change(
            f"per_device_train_batch_size=1{keep}",
            "more micro-batches, the same step",
            _set_keys("batch", **batch),
        )
    yield from optimizers(False)
    yield from _list_layouts(spec)
    if spec.device == "cuda" and not recipe.model.activation_offload:
        yield Change(
            "activation_offload=true",
            "what checkpointed layers keep is copied to the host and back, beside the computation",
            _set_keys("model", activation_offload=True),
        )
    yield from optimizers(True)
    if not recipe.optimization.optim_in_backward:
        yield Change(
            "optim_in_backward=true max_grad_norm=null",
            "no clipping of the gradient, which is freed in the backward",
            _set_keys("optimization", optim_in_backward=True, max_grad_norm=None),
        )
    if recipe.lora.use_peft:
        yield from _list_quantizations(spec)
    yield from _list_divisions(spec)
    if recipe.optimization.optim_offload == "none" and not spec.sharding.cpu_offload:
        yield Change(
            f"optim_offload=nvme offload_dir={A_FOLDER}",
            "moments and master weights are read from and written to a disk in every step",
            _set_keys("optimization", optim_offload="nvme", offload_dir=A_FOLDER),
        )
    if not spec.sharding.cpu_offload:
        cost = "several times the time"
        if spec.sharding.ranks_per_batch > 1:  # by a file that no shipped one replaces
            offload = _set_sharding(cpu_offload=True)
            yield Change("fsdp_offload_params: true", cost, offload, is_in_file=True)
        else:
            offload = partial(_shard_fully, cpu_offload=True)
            yield Change("accelerate_config=fsdp_cpu_offload", cost, offload)
    if recipe.data.max_length >= 2 * MIN_ROW_TOKENS:
        half = recipe.data.max_length // 2
        yield Change(
            f"max_length={half}", "longer examples are cut", _set_keys("data", max_length=half)
        )
    if not recipe.lora.use_peft:
        yield Change(
            "use_peft=true", "adapters instead of all parameters", _set_keys("lora", use_peft=True)
        )
        yield from _list_quantizations(spec)


def _list_layouts(spec: RunSpec) -> Iterator[Change]:
    """Lists the changes by which a layout gathers less, or keeps less."""
    sharding = spec.sharding
    architecture = spec.architecture
    if not sharding.activation_checkpointing:
        cost = "about 30% more time"
        checkpoint = _set_sharding(activation_checkpointing=True)
        if sharding.is_fsdp:
            yield Change("fsdp_activation_checkpointing: true", cost, checkpoint, is_in_file=True)
        elif sharding.layout == "ddp":
            checkpoint = _set_sharding(activation_checkpointing=True, **SHIPPED_PRECISION)
            yield Change("accelerate_config=ddp_checkpointing", cost, checkpoint)
        else:
            yield Change("accelerate_config=fsdp_full_shard", cost, _shard_fully)
    if sharding.ranks_per_batch == 1 and (
        spec.shards < spec.ranks or sharding.strategy == "SHARD_GRAD_OP"
    ):
        yield Change("accelerate_config=fsdp_full_shard", "more communication", _shard_fully)
    if architecture.mixture is not None:
        size = gcd(architecture.mixture.experts, spec.shards, spec.ranks_per_node)
        if size > sharding.expert_parallel_size:
            in_recipe = _set_keys("model", expert_parallel_size=size)
            in_layout = _set_sharding(expert_parallel_size=size)
            yield Change(
                f"expert_parallel_size={size}",
                f"{size} ranks exchange tokens, instead of gathering all experts of a layer",
                _apply_both(in_recipe, in_layout),
            )


def _list_divisions(spec: RunSpec) -> Iterator[Change]:
    """Lists larger groups of ranks that divide a row's tokens, or a layer's matrices.

    First comes the largest group within a node for each, then wider groups for tokens alone. An
    Accelerate file has sizes of a mesh for FSDP2 only.
    """
    sharding = spec.sharding
    if sharding.strategy == "HYBRID_SHARD":
        return
    wide: list[Change] = []
    for key, size in sharding.group_sizes.items():
        others = sharding.ranks_per_batch // size  # of a group already, by the other key
        larger = [each for each in GROUP_SIZES if each > size and spec.ranks % (each * others) == 0]
        usable = [
            each for each in larger if sharding.layout == "fsdp2" or _is_shipped(key, each, spec)
        ]
        changes = {each: _divide(spec, key, each) for each in usable}
        supported = [
            each for each, change in changes.items() if is_supported(change.apply(spec), spec)
        ]
        of_node = [each for each in supported if spec.ranks_per_node % (each * others) == 0]
        yield from (changes[each] for each in of_node[-1:])
        wide += (changes[each] for each in supported if each not in of_node and key == "cp_size")
    yield from wide


def _is_shipped(key: str, size: int, spec: RunSpec) -> bool:
    """Whether accelerate_configs/fsdp_sequence_parallel.yaml divides so."""
    return key == "cp_size" and size == spec.ranks == ROW_DIVIDING_RANKS


def _divide(spec: RunSpec, key: str, size: int) -> Change:
    """Groups of `size` ranks by this key of an Accelerate file; the other key and the rows of a
    step stay.
    """
    rows = spec.global_batch_size
    sharding = spec.sharding
    if spec.recipe.batch.global_batch_size:
        keep = ""
    else:
        keep = f"global_batch_size={rows}"
    keep_rows = _set_keys("batch", global_batch_size=rows, gradient_accumulation_steps=None)
    field, what = DIVISIONS[key]
    group = sharding.group_sizes | {key: size}
    groups = spec.ranks // prod(group.values())
    sizes: Record = {field: size, "shard_size": groups}
    is_wide = spec.ranks_per_node % prod(group.values()) != 0
    cost = (
        f"{size} ranks divide {what}; more communication{', between nodes too' if is_wide else ''}"
    )
    if _is_shipped(key, size, spec):
        text = f"accelerate_config=fsdp_sequence_parallel {keep}".rstrip()
        return Change(text, cost, _apply_both(keep_rows, partial(_shard_fully, **sizes)))
    mesh = {name: size for name, size in group.items() if size > 1} | {"dp_shard_size": groups}
    entries = ", ".join(f"parallelism_config_{name}: {size}" for name, size in mesh.items())
    text = f"parallelism_config: {{{entries}}}"
    if keep:
        cost += f"; {keep} keeps the step"
    return Change(text, cost, _apply_both(keep_rows, _set_sharding(**sizes)), is_in_file=True)


def _list_quantizations(spec: RunSpec) -> Iterator[Change]:
    """Lists the quantizations of the base in fewer bits than it has now: 8, then 4.

    They require adapters, which the change adds where there are none.
    """
    if spec.sharding.layout == "fsdp1":
        return
    adapters = "" if spec.recipe.lora.use_peft else "use_peft=true "
    for bits in (8, 4):
        if (spec.recipe.quantization.bits or 16) <= bits:
            continue
        keys = {f"load_in_{each}bit": each == bits for each in (8, 4)}
        quantize = _set_keys("quantization", **keys)
        adapt = _set_keys("lora", use_peft=True)
        cost = (
            f"a frozen base in {bits} bits: more time, a slightly worse start; needs bitsandbytes"
        )
        if adapters:
            cost = f"adapters on {cost}"
        yield Change(f"{adapters}load_in_{bits}bit=true", cost, _apply_both(adapt, quantize))


def _apply_both(
    first: Callable[[RunSpec], RunSpec], second: Callable[[RunSpec], RunSpec]
) -> Callable[[RunSpec], RunSpec]:
    """One change that makes two."""
    return lambda spec: second(first(spec))


def _set_sharding(**keys: Any) -> Callable[[RunSpec], RunSpec]:
    return lambda spec: replace(spec, sharding=replace(spec.sharding, **keys))


def _set_keys(section: str, **keys: Any) -> Callable[[RunSpec], RunSpec]:
    """A change of these keys in one section of the recipe."""

    def apply(spec: RunSpec) -> RunSpec:
        changed: Record = {section: replace(getattr(spec.recipe, section), **keys)}
        return replace(spec, recipe=replace(spec.recipe, **changed))

    return apply


# that of every file in accelerate_configs/
SHIPPED_PRECISION: Fields = {"mixed_precision": "bf16", "fp8": None}


def _shard_fully(spec: RunSpec, **keys: Any) -> RunSpec:
    """The layout of the shipped fsdp_full_shard.yaml, with these `keys`."""
    shipped: Record = {
        **SHIPPED_PRECISION,
        "layout": "fsdp2",
        "strategy": "FULL_SHARD",
        "wrapping": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": True,
        "replicate_size": None,
        "shard_size": None,
        **UNDIVIDED,
    }
    return _set_sharding(**shipped | keys)(spec)


RANKS_TO_TRY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # where no change is enough


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits a machine, and what makes it fit."""

    fits: bool  # in all that is known of the room
    need: Need  # of the run as it is
    changes: tuple[Change, ...] | None = ()  # that make it fit; None: no changes do
    after: Need | None = None  # with `changes`; with all that go together where no changes do
    ranks: int | None = None  # on which the latter would fit; None: on none that was tried
    tried: tuple[Change, ...] = ()  # where no changes make it fit


def advise(spec: RunSpec, room: Room, *, in_recipe: bool = False) -> Advice:
    """Finds the cheapest changes that make a run fit the memory of a machine.

    They are the first change that is enough alone, or with those before it. No change is made for
    the disk's sake.

    Args:
        spec: The run.
        room: What the machine has.
        in_recipe: Suggests changes of keys of the recipe alone.
    """
    needed = count_need(spec)
    if needed.fits_memory(room):
        return Advice(needed.fits(room), needed)
    changes = [change for change in list_changes(spec) if change.is_in_recipe or not in_recipe]
    orders = _list_orders(spec, changes)
    need_after = _calculate_once(spec)
    best = None
    dearest = len(changes)  # the place of the dearest one of the best
    for order in orders:
        enough = _find_enough(
            need_after, [change for change in order if changes.index(change) < dearest], room
        )
        if enough is not None:
            best = enough
            dearest = max(map(changes.index, enough))
    if best is not None:
        return Advice(False, needed, best, need_after(best))
    changed = min(
        (apply_changes(spec, order)[0] for order in orders), key=lambda each: find_peak(each).total
    )
    wider = (
        ranks
        for ranks in RANKS_TO_TRY
        if ranks > spec.ranks and ranks % changed.sharding.smallest_world == 0
    )
    more_ranks = (replace(changed, ranks=ranks) for ranks in wider)
    ranks = next((each.ranks for each in more_ranks if count_need(each).fits_memory(room)), None)
    return Advice(False, needed, None, count_need(changed), ranks=ranks, tried=tuple(changes))


def _calculate_once(spec: RunSpec) -> NeedAfter:
    """A function that gives the need of `spec` after changes, calculated once for each run that
    they make of it.
    """
    known: dict[str, Need] = {}

    def need_after(changes: Sequence[Change]) -> Need:
        changed = apply_changes(spec, changes)[0]
        key = repr((changed.recipe, changed.sharding))
        if key not in known:
            known[key] = count_need(changed)
        return known[key]

    return need_after


def _list_orders(spec: RunSpec, changes: list[Change]) -> list[list[Change]]:
    """The orders in which to try the `changes`, some of which keep others out.

    The first order is that of the list. In each other one a change that earlier ones keep out
    comes first, or two such changes that go together.
    """
    left_out = apply_changes(spec, changes)[1]
    pairs = [pair for pair in combinations(left_out, 2) if not apply_changes(spec, pair)[1]]
    orders = []
    for first in ((), *((change,) for change in left_out), *pairs):
        after = [change for change in changes if change not in first]
        orders.append([*first, *after])
    return orders


def _find_enough(
    need_after: NeedAfter, changes: Sequence[Change], room: Room
) -> tuple[Change, ...] | None:
    """The first change that is enough, alone or with those before it; of these, the dearest
    unnecessary ones are left out. None where all together are not enough.
    """
    taken: list[Change] = []
    for change in changes:
        if need_after([change]).fits_memory(room):
            return (change,)
        taken.append(change)
        if need_after(taken).fits_memory(room):
            break
    else:
        return None
    for change in reversed(list(taken)):
        fewer = [other for other in taken if other is not change]
        if need_after(fewer).fits_memory(room):
            taken = fewer
    return tuple(taken)
