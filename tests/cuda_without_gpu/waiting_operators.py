"""Single operators that make the host wait for the device, and others like them that do not: what fake_cuda.py must distinguish."""

from collections.abc import Callable

import torch

from tests.cuda_without_gpu.fake_cuda import fake_tensors

# What waits for the device, or should, and what does not; of a tensor [8] on it, and one on the host.
WAITING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "item": lambda x, _: x.sum().item(),
    "bool": lambda x, _: bool(x.any()),
    "tolist": lambda x, _: x.tolist(),
    "nonzero": lambda x, _: x.nonzero(),
    "a mask as index": lambda x, _: x[x > 0],
    "values at a mask": lambda x, _: x.clone().index_put_((x > 0,), x),
    "a copy to the host": lambda x, _: x.cpu(),
    "a copy from the host": lambda x, host: host.to(x.device),
    "a tensor of numbers": lambda x, _: torch.tensor([1.0, 2.0], device=x.device),
    "a choice of a number on the host": lambda x, host: torch.where(x > 0, x, host.sum()),
    "a copy to the host that is read too early": lambda x, _: x.to("cpu", non_blocking=True),
    "an event": lambda _, __: torch.cuda.Event().synchronize(),
}
NOT_WAITING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "item of the host": lambda _, host: host.sum().item(),
    "a mask that is filled": lambda x, _: x.clone().masked_fill_(x > 0, 0.0),
    "a number at a mask": lambda x, _: x.clone().__setitem__(x > 0, 0.0),
    "a copy that does not wait": lambda x, host: host.to(x.device, non_blocking=True),
    "a number of the host in a sum": lambda x, host: x + host.sum(),
    "a choice of a constant": lambda x, _: torch.where(x > 0, x, 1.0),
}


def find_waits() -> dict[str, list[str]]:
    """What is recorded of each of WAITING and NOT_WAITING, and the error of operands on two devices."""
    found = {}
    with fake_tensors({}) as waits:
        x, host = torch.ones(8, device="cuda"), torch.ones(8)
        for name, use in {**WAITING, **NOT_WAITING}.items():
            waits.found.clear()
            use(x, host)
            found[name] = [wait.what for wait in waits.found]
        try:
            x + host
        except RuntimeError as error:
            found["two devices"] = [str(error)]
    return found
