"""FlashAttention 3 and 4 by torch's own switch. No kernel runs here: what is tested is who is asked for it, and when."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention as torch_attention

from finetune.errors import UserError
from finetune.models.attention import NAME
from finetune.models.documents import activate_flash_kernels, install_attention
from finetune.training.screens import describe_flash_kernels
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


@pytest.mark.parametrize(
    ("name", "capability", "active"), [("3", (9, 0), "FA3"), ("4", (10, 0), "FA4")]
)
def test_an_installed_package_is_switched_on_under_our_packed_attention(
    name: str,
    capability: tuple[int, int],
    active: str,
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(monkeypatch, capability)
    model = build("llama")
    install_attention(model, f"flash_attention_{name}")
    assert torch_attention.current_flash_attention_impl() == active
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize(
    ("capability", "active"), [((8, 0), None), ((9, 0), "FA3"), ((10, 0), "FA4"), ((12, 0), None)]
)
def test_auto_takes_the_fastest_that_is_installed_and_runs_there(
    capability: tuple[int, int],
    active: str | None,
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(monkeypatch, capability)
    install_attention(build("llama"))
    assert torch_attention.current_flash_attention_impl() == active
    assert describe_flash_kernels() == (
        [f"        attention by the installed FlashAttention {active[-1]}"] if active else []
    )


def test_auto_stays_with_torchs_own_where_a_run_is_deterministic_or_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    install_attention(build("llama"))
    assert torch_attention.current_flash_attention_impl() is None
    assert describe_flash_kernels() == [
        "        attention by torch's FlashAttention 2; pip install flash-attn-4 for a faster one"
    ]
    request.getfixturevalue("installed")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    install_attention(build("llama"))
    assert torch_attention.current_flash_attention_impl() is None
    assert describe_flash_kernels() == []


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's real registrations, which import the packages; they are not installed here."""
    pytest.importorskip("torch.nn.attention._fa4")
    pretend_gpu(monkeypatch, (9, 0))
    for name in ("flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert not activate_flash_kernels(
        "flash_attention_3"
    )  # transformers looks for kernels on the hub
    with pytest.raises(
        UserError,
        match=r"_4 needs the package that has flash_attn.cute .*; install it, or leave the key",
    ):
        activate_flash_kernels("flash_attention_4")
    assert torch_attention.current_flash_attention_impl() is None
