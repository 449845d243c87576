"""The private names of libraries that the package uses: a new version may take any of them away without a word.

The names are read from the package's syntax trees. Those that can be imported are, and the rest must stand in the source
of the module that the table names. The failure is the name that has gone.
"""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from tests.ranks import ROOT

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "datasets")
# Attributes of objects: name -> the module whose source has it.
FSDP2 = "torch.distributed.fsdp._fully_shard"
ATTRIBUTES = {
    "_apply": "torch.nn.modules.module",
    "_apply_gate": "transformers.integrations.moe",
    "_attn_implementation": "transformers.configuration_utils",
    "_auto_reshard_after_forward": f"{FSDP2}._fsdp_state",
    "_buffers": "torch.nn.modules.module",
    "_can_record_outputs": "transformers.modeling_utils",
    "_can_set_experts_implementation": "transformers.modeling_utils",
    "_cdata": "torch.storage",
    "_disable_adapters": "peft.tuners.tuners_utils",
    "_fingerprint": "datasets.arrow_dataset",
    "_flat_param": "torch.distributed.fsdp._common_utils",
    "_forward_hooks": "torch.nn.modules.module",
    "_forward_pre_hooks": "torch.nn.modules.module",
    "_fsdp_param_groups": f"{FSDP2}._fsdp_state",
    "_get_fsdp_state": f"{FSDP2}._fully_shard",
    "_gradient_checkpointing_func": "transformers.modeling_layers",
    "_init_mp_dtypes": f"{FSDP2}._fsdp_param_group",
    "_init_weights": "transformers.modeling_utils",
    "_mixed_precision": "accelerate.state",
    "_model_mapping": "transformers.models.auto.auto_factory",
    "_modules": "torch.nn.modules.module",
    "_name_or_path": "transformers.configuration_utils",
    "_non_persistent_buffers_set": "torch.nn.modules.module",
    "_orig_dtype": f"{FSDP2}._fsdp_param_group",
    "_params": "torch.distributed.fsdp._flat_param",
    "_process_group": "torch.distributed._shard.sharded_tensor.api",
    "_scaled_dot_product_cudnn_attention": "torch._meta_registrations",
    "_scaled_dot_product_efficient_attention": "torch._meta_registrations",
    "_scaled_dot_product_flash_attention": "torch._meta_registrations",
    "_scaled_dot_product_flash_attention_for_cpu": "torch._meta_registrations",
    "_supports_sdpa": "transformers.modeling_utils",
    "_version": "torch.autograd.graph",
}
# Private attributes of Python, of jinja2 and of older versions, which the package asks for only where they are.
NOT_OF_LIBRARIES = {
    "_Namespace__attrs",
    "_current_frames",
    "_exit",
    "_fsdp_param_group",
    "_getframe",
    "_replace",
    "_run_exitfuncs",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.Attribute) -> list[str]:
    """The names of `a.b.c`; the first is "" where it is no name."""
    parts = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        parts.insert(0, value.attr)
        value = value.value
    return [value.id if isinstance(value, ast.Name) else "", *parts]


def imported_names(tree: ast.AST) -> dict[str, str]:
    """A file's name -> what it is in full, of the names that are imported from the libraries."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in LIBRARIES
        ):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.split(".")[0]
                if first in LIBRARIES:
                    names[each.asname or first] = each.name if each.asname else first
    return names


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private names that the package defines itself."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node)[0] == "self"
        ):
            names.add(node.attr)
    return names


@cache
def read_names() -> tuple[set[str], set[str]]:
    """(private names in full, private attributes of objects) that the package uses and does not define."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "finetune").rglob("*.py")
    ]
    in_full: set[str] = set()
    of_objects: set[str] = set()
    for tree in trees:
        imported = imported_names(tree)
        in_full |= set(imported.values())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            first, *rest = dotted(node)
            if first in imported:
                in_full.add(".".join([imported[first], *rest]))
            elif is_private(node.attr) and first not in ("self", "cls"):
                of_objects.add(node.attr)
    private = {name for name in in_full if any(map(is_private, name.split(".")))}
    return private, of_objects - own_names(trees)


def resolve(name: str) -> object:
    """The object of a name in full. Raises `ImportError` or `AttributeError` where there is none."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(value, part) and inspect.ismodule(value):
            importlib.import_module(".".join(parts[:number]))
        value = getattr(value, part)
    return value


def is_there(name: str) -> bool:
    """Whether the libraries have the object of a name in full."""
    if "._varlen_attn" in name:  # an operator that its module registers
        importlib.import_module("torch.nn.attention.varlen")
    try:
        resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_names_are_read() -> None:
    in_full, _ = read_names()
    assert "accelerate.commands.launch._validate_launch_command" in in_full
    assert len(in_full) > 40


def test_a_private_name_that_has_gone_is_found() -> None:
    assert is_there("torch.nn.Module._apply")
    assert not is_there("torch.nn.Module._applied")
    assert not is_there("torch._has_gone.name")


def test_every_private_name_of_a_library_is_there() -> None:
    in_full, _ = read_names()
    assert [name for name in sorted(in_full) if not is_there(name)] == []


def test_every_private_attribute_of_an_object_has_its_module_in_the_table() -> None:
    _, of_objects = read_names()
    assert ATTRIBUTES.keys() == of_objects - NOT_OF_LIBRARIES
    assert of_objects >= NOT_OF_LIBRARIES


@pytest.mark.parametrize(("name", "module"), ATTRIBUTES.items())
def test_a_private_attribute_stands_in_its_modules_source(name: str, module: str) -> None:
    file = importlib.import_module(module).__file__
    assert file is not None
    assert re.search(rf"\b{name}\b", Path(file).read_text(encoding="utf-8")), (
        f"{module} has no {name} any more"
    )
