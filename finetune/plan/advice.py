"""Whether a run fits a machine, and if not, the cheapest changes that make it fit.

A `Change` is text for the user and a function that changes a `RunSpec`, so that the plan of the
changed run shows what the change is worth.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import gcd, prod
from typing import Any

from finetune.config.compatibility import find_recipe_problems
from finetune.config.layout import DIVISIONS, UNDIVIDED
from finetune.config.optimization import list_smaller
from finetune.plan.peaks import find_peak
from finetune.plan.run_spec import RunSpec, plan_disk, plan_host

CONFIG_KEY = "accelerate_config="  # how the text of a change of the Accelerate file begins
A_FOLDER = "A_FOLDER_ON_NVME"  # a placeholder that the user fills in
MIN_ROW_TOKENS = 512  # max_length is not halved to fewer tokens than this
GROUP_SIZES = (2, 4, 8, 16, 32, 64)  # sizes of sequence- or tensor-parallel groups to try
SHIPPED_CP_SIZE = 8  # cp_size in accelerate_configs/fsdp_sequence_parallel.yaml


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a run."""

    # what the user appends to the command, or sets in the Accelerate file if `is_in_file`
    text: str
    cost: str  # the change's disadvantage, in words
    apply: Callable[[RunSpec], RunSpec]
    is_in_file: bool = False

    @property
    def is_in_recipe(self) -> bool:
        """Whether the change only sets keys of the recipe, to values that suit every machine."""
        return not self.is_in_file and A_FOLDER not in self.text

    @property
    def accelerate_config(self) -> str | None:
        """The shipped Accelerate file that replaces the run's own; None: the run's own stays."""
        words = self.text.split()
        return next(
            (word.removeprefix(CONFIG_KEY) for word in words if word.startswith(CONFIG_KEY)), None
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a machine has. A part that is None is not known, and is not compared."""

    device: int | None  # of each GPU; if the CPU computes, of the machine's memory
    host: int | None = None  # of a node's memory
    disk: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether all three parts are known."""
        return None not in (self.device, self.host, self.disk)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run needs of each part of a `Room`."""

    device: int
    host: int
    disk: int
    is_on_cpu: bool = False  # the CPU computes
    keeps_more: bool = False  # `Disk.keeps_more`: `disk` is not all

    def fits_memory(self, room: Room) -> bool:
        """Whether device and host memory are large enough, as far as they are known."""
        return self.device <= (room.device or self.device) and self.host <= (room.host or self.host)

    def fits(self, room: Room) -> bool:
        """Whether memory and disk are large enough, as far as they are known."""
        return self.fits_memory(room) and self.disk <= (room.disk or self.disk)


def count_need(spec: RunSpec) -> Need:
    """Counts the bytes that the run needs of a GPU, of a node's memory, and of the disk."""
    peak = find_peak(spec).total
    disk = plan_disk(spec)
    return Need(
        device=peak,
        host=plan_host(spec, peak).total,
        disk=disk.total,
        is_on_cpu=spec.device == "cpu",
        keeps_more=disk.keeps_more,
    )


NeedAfter = Callable[[Sequence[Change]], Need]  # the need of a run after changes of it


def is_supported(changed: RunSpec, original: RunSpec) -> bool:
    """Whether no rule refuses `changed`, besides rules that refuse the `original` run already."""
    return _list_refusing_rules(changed) <= _list_refusing_rules(original)


def _list_refusing_rules(spec: RunSpec) -> set[str]:
    """Lists the names of the rules that refuse the run, those for a recipe's file included."""
    problems = [*spec.find_problems(), *find_recipe_problems(spec.recipe, unusable=())]
    return {problem.rule for problem in problems if not problem.is_note}


def list_changes(spec: RunSpec) -> Iterator[Change]:
    """Yields the changes of a run that the rules allow, from the cheapest to the dearest.

    First come changes that cost little time, then those that cost much, and last those that train
    fewer parameters.
    """
    return (change for change in _list_candidates(spec) if is_supported(change.apply(spec), spec))


def apply_changes(spec: RunSpec, changes: Iterable[Change]) -> tuple[RunSpec, list[Change]]:
    """Applies one change after another.

    Returns:
        The changed run, and the changes that were left out because a rule refuses them with those
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
    """Describes what the user does for each change: append it to the command, or edit a file.

    Args:
        changes: The changes, which are made together.
        source: The run's Accelerate file. A change in a file is made in that one, unless one of
            `changes` takes another.
        has_config: The command names its Accelerate file by --config, which overrides the recipe's
            key.
    """
    file = next(
        (change.accelerate_config for change in reversed(changes) if change.accelerate_config),
        source,
    )
    config_key = "--config " if has_config else CONFIG_KEY
    lines = []
    for change in changes:
        if change.is_in_file:
            lines.append(f"in {file}: {change.text}")
        else:
            lines.append(change.text.replace(CONFIG_KEY, config_key))
    return lines


def _list_candidates(spec: RunSpec) -> Iterator[Change]:
    """Yields all changes that could save memory, from the cheapest to the dearest.

    The rules may refuse some of them.
    """
    recipe = spec.recipe

    def list_optimizers(*, with_package: bool) -> Iterator[Change]:
        smaller = list_smaller(recipe.optimization.optim, with_package=with_package)
        for name, cost in smaller.items():
            yield Change(f"optim={name}", cost, _set_keys("optimization", optim=name))

    if spec.rows > 1:
        batch = {
            "per_device_train_batch_size": 1,
            "global_batch_size": spec.global_batch_size,
            "gradient_accumulation_steps": None,
        }
        yield Change(
            f"per_device_train_batch_size=1 {_name_rows(spec)}".rstrip(),
            "more micro-batches, the same step",
            _set_keys("batch", **batch),
        )
    yield from list_optimizers(with_package=False)
    yield from _list_layouts(spec)
    if spec.device == "cuda" and not recipe.model.activation_offload:
        yield Change(
            "activation_offload=true",
            "what checkpointed layers keep is copied to the host and back, beside the computation",
            _set_keys("model", activation_offload=True),
        )
    yield from list_optimizers(with_package=True)
    if not recipe.optimization.optim_in_backward:
        yield Change(
            "optim_in_backward=true max_grad_norm=null",
            "no clipping of the gradient, which is freed in the backward",
            _set_keys("optimization", optim_in_backward=True, max_grad_norm=None),
        )
    if recipe.lora.use_peft:
        yield from _list_quantizations(spec)
    yield from _list_larger_groups(spec)
    if recipe.optimization.optim_offload == "none" and not spec.sharding.cpu_offload:
        yield Change(
            f"optim_offload=nvme offload_dir={A_FOLDER}",
            "moments and master weights are read from and written to a disk in every step",
            _set_keys("optimization", optim_offload="nvme", offload_dir=A_FOLDER),
        )
    if not spec.sharding.cpu_offload:
        cost = "several times the time"
        # The shipped file would replace the sizes of the groups, so such a run keeps its own file.
        if spec.sharding.ranks_per_batch > 1:
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
    """Yields the changes of the layout that gather fewer weights or keep fewer activations."""
    sharding = spec.sharding
    architecture = spec.architecture
    if not sharding.activation_checkpointing:
        cost = "about 30% more time"
        checkpoint = _set_sharding(activation_checkpointing=True)
        if sharding.is_fsdp:
            yield Change("fsdp_activation_checkpointing: true", cost, checkpoint, is_in_file=True)
        elif sharding.layout == "ddp":
            checkpoint = _set_sharding(activation_checkpointing=True, **SHIPPED)
            yield Change("accelerate_config=ddp_checkpointing", cost, checkpoint)
        else:
            yield Change("accelerate_config=fsdp_full_shard_auto", cost, _shard_fully)
    if sharding.ranks_per_batch == 1 and (
        spec.shards < spec.ranks or sharding.strategy == "SHARD_GRAD_OP"
    ):
        yield Change("accelerate_config=fsdp_full_shard_auto", "more communication", _shard_fully)
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


def _list_larger_groups(spec: RunSpec) -> Iterator[Change]:
    """Yields changes that make the run's sequence- or tensor-parallel groups larger.

    First comes, for each of the two, the largest group within a node. Then come sequence-parallel
    groups over several nodes.
    """
    sharding = spec.sharding
    if sharding.strategy == "HYBRID_SHARD":
        return
    over_nodes: list[Change] = []
    for key, size_now in sharding.group_sizes.items():
        # the ranks of a group that the other key, and a pipeline, make already
        other_ranks = sharding.ranks_per_batch // size_now
        larger = [
            size
            for size in GROUP_SIZES
            if size > size_now and spec.ranks % (size * other_ranks) == 0
        ]
        # Accelerate reads the sizes of a mesh for FSDP2 only; else only a shipped file will do.
        usable = [
            size for size in larger if sharding.layout == "fsdp2" or _is_shipped(key, size, spec)
        ]
        changes = {size: _enlarge_group(spec, key, size) for size in usable}
        supported = [
            size for size, change in changes.items() if is_supported(change.apply(spec), spec)
        ]
        within_node = [
            size for size in supported if spec.ranks_per_node % (size * other_ranks) == 0
        ]
        if within_node:
            yield changes[max(within_node)]
        if key == "cp_size":
            over_nodes += (changes[size] for size in supported if size not in within_node)
    yield from over_nodes


def _is_shipped(key: str, size: int, spec: RunSpec) -> bool:
    """Whether accelerate_configs/fsdp_sequence_parallel.yaml has this size of this key."""
    return key == "cp_size" and size == spec.ranks == SHIPPED_CP_SIZE


def _name_rows(spec: RunSpec) -> str:
    """Returns what a user sets to keep the rows of a step; empty if the recipe keeps them."""
    batch = spec.recipe.batch
    settings = []
    if not batch.global_batch_size:
        settings.append(f"global_batch_size={spec.global_batch_size}")
    if batch.gradient_accumulation_steps:
        settings.append("gradient_accumulation_steps=null")
    return " ".join(settings)


def _enlarge_group(spec: RunSpec, key: str, size: int) -> Change:
    """Makes the change that sets `key` (cp_size or tp_size) of an Accelerate file to `size`.

    The other key and the rows of a step stay as they are.
    """
    rows = spec.global_batch_size
    keep_rows = _set_keys("batch", global_batch_size=rows, gradient_accumulation_steps=None)
    settings = _name_rows(spec)
    field, what_is_divided = DIVISIONS[key]
    group_sizes = spec.sharding.group_sizes | {key: size}
    ranks_of_group = prod(group_sizes.values())
    shards = spec.ranks // (ranks_of_group * spec.sharding.pipeline_parallel_size)
    sharding_keys: dict[str, Any] = {field: size, "shard_size": shards}
    cost = f"{size} ranks divide {what_is_divided}; more communication"
    if spec.ranks_per_node % ranks_of_group != 0:
        cost += ", between nodes too"
    if _is_shipped(key, size, spec):
        text = f"accelerate_config=fsdp_sequence_parallel {settings}".rstrip()
        return Change(text, cost, _apply_both(keep_rows, partial(_shard_fully, **sharding_keys)))
    if settings:
        cost += f"; {settings} keeps the step"
    mesh_sizes = {name: ranks for name, ranks in group_sizes.items() if ranks > 1}
    mesh_sizes["dp_shard_size"] = shards
    entries = ", ".join(f"parallelism_config_{name}: {n}" for name, n in mesh_sizes.items())
    text = f"parallelism_config: {{{entries}}}"
    apply = _apply_both(keep_rows, _set_sharding(**sharding_keys))
    return Change(text, cost, apply, is_in_file=True)


def _list_quantizations(spec: RunSpec) -> Iterator[Change]:
    """Yields the changes that quantize the base to fewer bits than it has now: 8, then 4.

    They require adapters, so each change also adds adapters to a run without them.
    """
    if spec.sharding.layout == "fsdp1":
        return
    adapters = "" if spec.recipe.lora.use_peft else "use_peft=true "
    bits_now = spec.recipe.quantization.bits or 16
    for bits in (8, 4):
        if bits_now <= bits:
            continue
        quantize = _set_keys("quantization", load_in_8bit=bits == 8, load_in_4bit=bits == 4)
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
    """Makes a function that applies `first` to a run, and then `second`."""
    return lambda spec: second(first(spec))


def _set_sharding(**keys: Any) -> Callable[[RunSpec], RunSpec]:
    """Makes a function that sets these fields of a run's layout."""
    return lambda spec: replace(spec, sharding=replace(spec.sharding, **keys))


def _set_keys(section: str, **keys: Any) -> Callable[[RunSpec], RunSpec]:
    """Makes a function that sets these keys in one section of a run's recipe."""

    def apply(spec: RunSpec) -> RunSpec:
        changed: dict[str, Any] = {section: replace(getattr(spec.recipe, section), **keys)}
        return replace(spec, recipe=replace(spec.recipe, **changed))

    return apply


# what the files in accelerate_configs/ that are suggested have in common
SHIPPED: Mapping[str, Any] = {"mixed_precision": "bf16", "fp8": None, "wrap_classes": ()}


def _shard_fully(spec: RunSpec, **keys: Any) -> RunSpec:
    """Sets a run's layout to that of the shipped fsdp_full_shard_auto.yaml, changed by `keys`."""
    shipped: dict[str, Any] = {
        **SHIPPED,
        "layout": "fsdp2",
        "strategy": "FULL_SHARD",
        "wrapping": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": True,
        "replicate_size": None,
        "shard_size": None,
        **UNDIVIDED,
    }
    return _set_sharding(**shipped | keys)(spec)


# numbers of ranks that are tried if no change makes the run fit on its own ranks
RANKS_TO_TRY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether a run fits a machine, and what makes it fit."""

    fits: bool  # fits each part of the room that is known
    need: Need  # of the run without changes
    changes: tuple[Change, ...] | None = ()  # what makes the run fit; None: no changes do
    # of the run after `changes`; if those are None, after as many of `tried` as go together
    after: Need | None = None
    # If `changes` is None: on how many ranks `after` would fit; None: on none that was tried.
    ranks: int | None = None
    tried: tuple[Change, ...] = ()  # all changes, if no changes make the run fit


def advise(spec: RunSpec, room: Room, *, in_recipe: bool = False) -> Advice:
    """Finds the cheapest changes that make a run fit the memory of a machine.

    The dearest of these changes is as cheap as possible. No change is suggested to save disk.

    Args:
        spec: The run.
        room: What the machine has.
        in_recipe: Suggests only changes of keys of the recipe.
    """
    need = count_need(spec)
    if need.fits_memory(room):
        return Advice(need.fits(room), need)
    changes = [change for change in list_changes(spec) if change.is_in_recipe or not in_recipe]
    orders = _list_orders(spec, changes)
    need_after = _cache_need_after(spec)
    best = None
    dearest = len(changes)  # the index, in `changes`, of the dearest change in `best`
    for order in orders:
        cheaper = [change for change in order if changes.index(change) < dearest]
        enough = _find_enough(need_after, cheaper, room)
        if enough is not None:
            best = enough
            dearest = max(map(changes.index, enough))
    if best is not None:
        return Advice(False, need, best, need_after(best))
    # No changes are enough: take the order after which the run is smallest, and try more ranks.
    changed_runs = [changed for changed, _ in (apply_changes(spec, order) for order in orders)]
    smallest = min(changed_runs, key=lambda changed: find_peak(changed).total)
    more_ranks = (
        ranks
        for ranks in RANKS_TO_TRY
        if ranks > spec.ranks and ranks % smallest.sharding.smallest_world == 0
    )
    enough_ranks = next(
        (
            ranks
            for ranks in more_ranks
            if count_need(replace(smallest, ranks=ranks)).fits_memory(room)
        ),
        None,
    )
    return Advice(False, need, None, count_need(smallest), ranks=enough_ranks, tried=tuple(changes))


def _cache_need_after(spec: RunSpec) -> NeedAfter:
    """Makes a function that returns the need of `spec` after changes.

    It calculates the need of each changed run only once.
    """
    known: dict[str, Need] = {}

    def need_after(changes: Sequence[Change]) -> Need:
        changed, _ = apply_changes(spec, changes)
        key = repr((changed.recipe, changed.sharding))
        if key not in known:
            known[key] = count_need(changed)
        return known[key]

    return need_after


def _list_orders(spec: RunSpec, changes: list[Change]) -> list[list[Change]]:
    """Lists the orders in which to try the changes: a change can exclude a later one.

    The first order is `changes`. Each other order begins with a change that earlier ones exclude,
    or with two such changes that do not exclude each other.
    """
    _, excluded = apply_changes(spec, changes)
    pairs = []
    for pair in combinations(excluded, 2):
        _, excluded_by_each_other = apply_changes(spec, pair)
        if not excluded_by_each_other:
            pairs.append(pair)
    orders = []
    for beginning in ((), *((change,) for change in excluded), *pairs):
        rest = [change for change in changes if change not in beginning]
        orders.append([*beginning, *rest])
    return orders


def _find_enough(
    need_after: NeedAfter, changes: Sequence[Change], room: Room
) -> tuple[Change, ...] | None:
    """Finds the first change that makes the run fit, alone or together with those before it.

    Returns that change alone, or with those of the changes before it that are necessary: from the
    dearest to the cheapest, each one is left out if the run fits without it. Returns None if all
    changes together are not enough.
    """
    together: list[Change] = []
    for change in changes:
        if need_after([change]).fits_memory(room):
            return (change,)
        together.append(change)
        if need_after(together).fits_memory(room):
            break
    else:
        return None
    for change in reversed(list(together)):
        fewer = [other for other in together if other is not change]
        if need_after(fewer).fits_memory(room):
            together = fewer
    return tuple(together)
