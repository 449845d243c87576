"""The structure of the package as the pages describe it: CONTRIBUTING's tree, the walks of docs/design.md, names used once."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from finetune.config.families import FAMILIES
from finetune.config.methods import DEFAULT_METHOD, METHODS
from finetune.config.optimization import OPTIMIZERS
from finetune.config.schedules import SCHEDULES
from tests.ranks import ROOT

PACKAGE = ROOT / "finetune"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def walk(path: Path) -> list[ast.AST]:
    """All nodes of a file. Python walks the package's in seconds."""
    return list(ast.walk(parse(path)))


def first_line(path: Path) -> str:
    """The first paragraph of a module's docstring on one line, without its end."""
    docstring = ast.get_docstring(parse(path))
    assert docstring, f"{path.relative_to(ROOT)} does not say what it is"
    return " ".join(docstring.split("\n\n")[0].split()).rstrip(".")


def tree() -> list[str]:
    """A line for each package and each module beside them: its name, and the first line of its docstring."""
    packages = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    modules = sorted(path for path in PACKAGE.glob("*.py") if not path.name.startswith("__"))
    lines = [(f"{path.name}/", first_line(path / "__init__.py")) for path in packages]
    lines += [(path.name, first_line(path)) for path in modules]
    return [f"  {name:<17} {what}" for name, what in lines]


def test_contributing_ends_in_the_tree() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(finetune/\n.*?)^```$", page, re.M | re.S)
    assert blocks and page.rstrip().endswith("```")
    assert blocks[-1].splitlines()[1:] == tree(), "\n" + "\n".join(tree())


def test_no_file_name_is_used_twice() -> None:
    names = Counter(
        path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "cli.py")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_class_name_is_used_twice() -> None:
    names: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        names.update(node.name for node in walk(path) if isinstance(node, ast.ClassDef))
    # peft's layer, under whose name both of its variants are known.
    assert [name for name, count in names.items() if count > 1 and name != "Linear"] == []


def test_no_module_gives_a_name_twice() -> None:
    """As a merge may: ruff accepts a constant whose value is assigned again."""
    twice = []
    for path in PACKAGE.rglob("*.py"):
        names: Counter[str] = Counter()
        for node in parse(path).body:
            if isinstance(node, FUNCTIONS | ast.ClassDef):
                names[node.name] += 1
            elif isinstance(node, ast.Assign):
                names.update(each.id for each in node.targets if isinstance(each, ast.Name))
        twice += [f"{path.relative_to(PACKAGE)}: {name}" for name in names if names[name] > 1]
    assert twice == []


BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)


def test_no_function_is_a_maze() -> None:
    """Ruff's C901 counts neither conditional expressions nor comprehensions, each of which a reader follows."""
    mazes = []
    for path in PACKAGE.rglob("*.py"):
        for node in walk(path):
            if isinstance(node, FUNCTIONS):
                branches = 1 + sum(isinstance(inner, BRANCHES) for inner in ast.walk(node))
                if branches > 15:
                    mazes.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert mazes == []


def test_one_statement_assigns_several_values_only_where_they_depend_on_each_other() -> None:
    """As in a swap: `a, b = b, a`."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in walk(path):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
                continue
            target = node.targets[0]
            if not isinstance(target, ast.Tuple) or not all(
                isinstance(name, ast.Name) for name in target.elts
            ):
                continue
            assigned = {ast.unparse(name) for name in target.elts}
            read = {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
            if len(target.elts) == len(node.value.elts) and not assigned & read:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_no_conditional_expression_lies_within_another_one() -> None:
    nested = []
    for path in PACKAGE.rglob("*.py"):
        for node in walk(path):
            if not isinstance(node, ast.IfExp):
                continue
            if any(isinstance(part, ast.IfExp) for part in ast.walk(node) if part is not node):
                nested.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert nested == []


def test_every_argument_is_described_on_a_line_of_its_own() -> None:
    joined = []
    for path in PACKAGE.rglob("*.py"):
        for node in walk(path):
            docstring = ast.get_docstring(node) if isinstance(node, FUNCTIONS) else None
            for name in re.findall(r"\S\. (\w+): ", docstring or ""):
                if name in {
                    argument.arg
                    for argument in ast.walk(node.args)
                    if isinstance(argument, ast.arg)
                }:
                    joined.append(f"{path.relative_to(PACKAGE)}: {node.name}: {name}")
    assert joined == []


def test_every_file_says_what_it_is() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__main__.py":
            assert len(first_line(path)) <= 140, (
                f"{path.relative_to(ROOT)}: the first line is no summary"
            )


def test_the_design_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))
    assert len(named) > 25
    assert (
        sorted(
            name for name in named if not ((PACKAGE / name).is_file() or (ROOT / name).is_file())
        )
        == []
    )


@cache
def strings(path: Path) -> list[tuple[int, str]]:
    """The strings of a file, each with its line; docstrings, whose examples may name anything, are left out."""
    prose = {id(node.value) for node in walk(path) if isinstance(node, ast.Expr)}
    constants = [
        node for node in walk(path) if isinstance(node, ast.Constant) and id(node) not in prose
    ]
    return [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]


# What other tools call things: their methods and schedules have some of our names.
OTHER_TOOLS = (
    "config/other_names.py",
    *(f"convert/{path.name}" for path in PACKAGE.glob("convert/*.py")),
)

# What is a row of a table -> its names, and the only files that name one.
TABLES = {
    "optimizers": (OPTIMIZERS, ("config/optimization.py", "optim/optimizers.py")),
    "schedules": (
        [name for name in SCHEDULES if "_" in name],
        ("config/schedules.py", *OTHER_TOOLS),
    ),
    # Published models by their names are convert's, chat templates data's.
    "families": (
        [name for name in FAMILIES if name not in ("llama", "mistral", "qwen3", "rwkv", "glm4")],
        (
            "config/families.py",
            "data/tokenizer.py",
            "export/formats/gguf_tokenizer.py",
            *OTHER_TOOLS,
        ),
    ),
    "methods": (
        # A word of grpo's, and one of parameters' names. Tinker has a loss of a method's name.
        [name for name in METHODS if name not in (DEFAULT_METHOD, "reward", "embed")],
        (
            "config/methods.py",
            "training/objectives/preference.py",
            "service/losses.py",
            *OTHER_TOOLS,
        ),
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_what_is_a_row_of_a_table_is_named_nowhere_else(table: str) -> None:
    names, homes = TABLES[table]
    pattern = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?![\w-])")
    named = {
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in PACKAGE.rglob("*.py")
        for line, text in strings(path)
        if str(path.relative_to(PACKAGE)) not in homes and pattern.search(text)
    }
    assert sorted(named) == []
