"""An optimizer whose state lies in a file of each rank, as ZeRO-Infinity's (Rajbhandari et al. 2021, section 5.2), under FSDP2.

Moments, and fp32 master weights where the model computes in another dtype, are read into one buffer, updated there and
written back, while what was in the other buffer is written and what comes next is read into it. A buffer holds a window
of the state: parameters in the order of the optimizer, as many bytes as the largest decoder layer has. Each update is made
by the optimizer that would make it in memory, in the same order: bit for bit the same.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.schema import Optimization
from finetune.constants import COMPUTE_DTYPE, OPTIMIZERS
from finetune.distributed.collective import RankGroup
from finetune.distributed.master_weights import take_master_weights
from finetune.distributed.parallelize import local_part, unwrap
from finetune.distributed.world import World
from finetune.optim.scratch_file import ScratchFile, allocate_aligned, open_scratch_file
from finetune.optim.state_windows import FIRST, MASTER, SECOND, Entry, OffloadedTensor, StateLayout, Window

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer that `make` makes, over the trained parameters of a `model` under FSDP2. All ranks make the same calls.

    `groups`: its parameter groups. Trained parameters are from here on in the compute dtype. State in memory of each:
    `step` (fp32 scalar). The rest is in the rank's file, which ends with the process: only a checkpoint outlives it.

    Raises `UserError` on all ranks where `offload_dir` of one cannot be written, or its disk has too little space.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        make: MakeOptimizer,
        optimization: Optimization,
        world: World,
    ) -> None:
        super().__init__(groups, {"lr": optimization.learning_rate})
        self._ranks = RankGroup(world)
        self._inner = make([group | {"params": [nn.Parameter(torch.empty(0))]} for group in groups])
        for group in self._inner.param_groups:
            if "foreach" in group:  # in memory torch does not choose it for sharded tensors, but would for these
                group["foreach"] = False
        self._settings = self._inner.param_groups
        trained = groups[0]["params"][0]
        mixed = world.sharding.mixed_precision
        compute_dtype = trained.dtype if mixed == "no" else getattr(torch, COMPUTE_DTYPE[mixed])
        moment_dtype = torch.bfloat16 if OPTIMIZERS[optimization.optim].moment_itemsize == 2 else None
        layout = StateLayout(unwrap(model), self.param_groups, moment_dtype, compute_dtype)
        self.file = self._open(Path(optimization.offload_dir or ""), layout.size)
        self.windows, self.capacity = layout.windows(self.file), layout.capacity
        self.buffers = [allocate_aligned(self.capacity, world.device) for _ in range(2)]
        # A GPU's parameters are updated there, as they are in memory: another processor rounds otherwise.
        on_gpu = trained.device.type != "cpu"
        self._staging = torch.empty(self.capacity, dtype=torch.uint8, device=trained.device) if on_gpu else None
        # One thread: a buffer is written before the next window is read into it.
        self._io = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        entries = [entry for window in self.windows for entry in window.entries]
        masters = {entry.parameter: entry.tensors[MASTER] for entry in entries if MASTER in entry.tensors}
        self._ranks.all(
            lambda: take_master_weights(model, compute_dtype, lambda weight: masters[weight].copy_(local_part(weight)))
        )
        step_device = trained.device if self._inner.defaults.get("fused") else torch.device("cpu")
        for entry in entries:
            self.state[entry.parameter]["step"] = torch.zeros((), dtype=torch.float32, device=step_device)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. Raises `UserError` on all ranks where the disk of one fails."""
        assert closure is None, "closures are not supported"
        self._ranks.all(self._update_all)

    def master_weights(self) -> dict[str, OffloadedTensor]:
        """The fp32 weights behind the parameters, by the parameters' names; empty where these are their own."""
        return self._list_tensors(lambda entry: {entry.name: entry.tensors[MASTER]} if MASTER in entry.tensors else {})

    def moments(self) -> dict[str, OffloadedTensor | Tensor]:
        """The rest of the state, named as torch's flat optimizer state: `state.<parameter>.exp_avg` and so on."""
        return self._list_tensors(
            lambda entry: {
                **{f"state.{entry.name}.{name}": entry.tensors[name] for name in (FIRST, SECOND)},
                f"state.{entry.name}.step": self.state[entry.parameter]["step"],
            }
        )

    def _list_tensors(self, of: Callable[[Entry], dict[str, Any]]) -> dict[str, Any]:
        return {
            name: tensor for window in self.windows for entry in window.entries for name, tensor in of(entry).items()
        }

    def _open(self, folder: Path, size: int) -> ScratchFile:
        opened: list[ScratchFile] = []
        self._ranks.all(lambda: opened.append(open_scratch_file(folder, size)))
        return opened[0]

    @torch.no_grad()
    def _update_all(self) -> None:
        """One pass over the file: while a window is updated, the one before it is written and the one after it read."""
        following = self._io.submit(self._read, 0)
        written: list[Future[None]] = []
        try:
            for index, window in enumerate(self.windows):
                following.result()
                if index + 1 < len(self.windows):
                    following = self._io.submit(self._read, index + 1)
                event = self._update(window, self.buffers[index % 2])
                written.append(self._io.submit(self._write, index, event))
        finally:  # what is still under way uses the buffers
            failures = [each.exception() for each in (following, *written)]
        for failure in failures:
            if failure is not None:
                raise failure

    def _read(self, index: int) -> None:
        window = self.windows[index]
        self.file.read(window.offset, self.buffers[index % 2][: window.nbytes])

    def _write(self, index: int, event: Any) -> None:
        if event is not None:
            event.synchronize()
        window = self.windows[index]
        self.file.write(window.offset, self.buffers[index % 2][: window.nbytes])

    def _update(self, window: Window, buffer: Tensor) -> Any:
        """Updates what `buffer` holds, and the parameters. Returns the event after which `buffer` has the result; None: now."""
        memory = buffer[: window.nbytes]
        if self._staging is not None:
            memory = self._staging[: window.nbytes].copy_(memory, non_blocking=True)
        for index, group in enumerate(self.param_groups):
            self._update_group(
                group, index, [entry for entry in window.entries if entry.group == index], memory, window
            )
        if self._staging is None:
            return None
        buffer[: window.nbytes].copy_(memory, non_blocking=True)
        return torch.cuda.current_stream(memory.device).record_event()

    def _update_group(
        self, group: dict[str, Any], index: int, entries: list[Entry], memory: Tensor, window: Window
    ) -> None:
        """The inner optimizer's step over `entries`, whose state is in `memory`."""
        updated: list[tuple[Tensor, nn.Parameter]] = []
        inner = self._inner
        for entry in entries:
            if entry.parameter.grad is None:
                continue
            views = {name: tensor.within(memory, window.offset) for name, tensor in entry.tensors.items()}
            weight = views.pop(MASTER, None)
            if weight is None:
                weight = local_part(entry.parameter).detach()
            weight.grad = local_part(entry.parameter.grad)
            inner.state[weight] = {"step": self.state[entry.parameter]["step"], **views}
            updated.append((weight, entry.parameter))
        if not updated:
            return
        settings = {"lr": group["lr"], "params": [weight for weight, _ in updated]}
        inner.param_groups = [self._settings[index] | settings]
        inner.step()
        for weight, parameter in updated:
            local_part(parameter).copy_(weight)
        inner.state.clear()  # it would keep the gradients
        inner.param_groups = self._settings
