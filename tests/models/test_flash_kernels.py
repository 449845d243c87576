"""FlashAttention 3 and 4 by torch's own switch. No kernel runs here: what is tested is who is asked for it, and when."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention as torch_attention

from finetune.errors import UserError
from finetune.models.attention.documents import NAME, activate_flash_kernels, install_attention
from tests.models.families import build


class Handle:
    """What a package's registration returns."""

    def remove(self) -> None: ...


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package for each, registered with torch as the real ones are; torch's own registrations come back."""
    from torch.nn.attention import _registry

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    for name in ("FA3", "FA4"):
        torch_attention.register_flash_attention_impl(name, register_fn=Handle)
    yield
    torch_attention.restore_flash_attention_impl()


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(("name", "capability", "active"), [("3", (9, 0), "FA3"), ("4", (10, 0), "FA4")])
def test_an_installed_package_is_switched_on_under_our_packed_attention(
    name: str, capability: tuple[int, int], active: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    model = build("llama")
    install_attention(model, f"flash_attention_{name}")
    assert torch_attention.current_flash_attention_impl() == active
    assert model.config._attn_implementation == NAME


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's real registrations, which import the packages; they are not installed here."""
    pytest.importorskip("torch.nn.attention._fa4")
    pretend_gpu(monkeypatch, (9, 0))
    for name in ("flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert not activate_flash_kernels("flash_attention_3")  # transformers looks for kernels on the hub
    with pytest.raises(
        UserError, match=r"_4 needs the package that has flash_attn.cute .*; install it, or leave the key"
    ):
        activate_flash_kernels("flash_attention_4")
    assert torch_attention.current_flash_attention_impl() is None
