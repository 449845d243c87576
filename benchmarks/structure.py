"""The size and shape of the package, before and after: `python benchmarks/structure.py [REVISION
...]`.

Counts for each git revision, and for the working tree last: tokens, and for 1,000 lines of code
ternaries, comprehensions and tuple assignments; cyclomatic numbers of functions; files and lines,
small files, names used twice, long lines, functions with a single caller, functions that refuse
something, what `training/loop.py` loads, the files and lines of a step (those that docs/design.md
names in "The life of a step"), and in how many files five recipe keys are mentioned. Reads the
sources as text; nothing is imported.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "finetune"
SMALL_LINES = 60
LONG_LINES = 60
LINE_LENGTH = 100
DESIGN = "docs/design.md"
# A key, and the names under which its value travels.
SPREAD = {
    "tp_size": r"tp_size|tensor_parallel_size",
    "load_in_4bit": r"load_in_4bit",
    "optim": r"optimization\.optim\b|\"optim\"",
    "packing": r"(?<!finetune\.)data\.packing|\"packing\"",
    "max_length": r"\bmax_length\b",
}
Sources = Mapping[str, str]
"""Path from the repository's root -> text."""


def read_revision(revision: str) -> Sources:
    """The package's Python files as git has them at `revision`."""
    listed = _git("ls-tree", "-r", "--name-only", revision, PACKAGE).splitlines()
    paths = [path for path in listed if path.endswith(".py")] + [DESIGN]
    return {path: _git("show", f"{revision}:{path}") for path in paths}


def read_working_tree() -> Sources:
    """The package's Python files as they are."""
    paths = [*sorted((ROOT / PACKAGE).rglob("*.py")), ROOT / DESIGN]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def measure(read: Sources) -> dict[str, int]:
    """Every count, by its name."""
    sources = {path: text for path, text in read.items() if path != DESIGN}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    may_repeat = ("__init__.py", "/cli.py")
    file_names = Counter(
        PurePosixPath(path).name for path in sources if not path.endswith(may_repeat)
    )
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    callers = count_callers(trees.values())
    return measure_grain(sources, nodes) | {
        "files": len(sources),
        "lines": sum(len(text.splitlines()) for text in sources.values()),
        f"files under {SMALL_LINES} lines": sum(
            len(sources[path].splitlines()) < SMALL_LINES for path in sources
        ),
        "  of these with one importer": count_small_with_one_importer(sources, trees),
        f"lines over {LINE_LENGTH} characters": sum(
            len(line) > LINE_LENGTH for t in sources.values() for line in t.splitlines()
        ),
        "file names used twice (but cli.py)": sum(count > 1 for count in file_names.values()),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "functions": len(functions),
        "functions with one caller": sum(callers[function.name] == 1 for function in functions),
        f"functions over {LONG_LINES} lines": sum(
            _lines(function) > LONG_LINES for function in functions
        ),
        "functions named check, refuse, explain": sum(
            bool(re.match(r"_?(check|refuse|explain)_", function.name)) for function in functions
        ),
        "modules that training/loop.py loads": len(
            loaded_modules(f"{PACKAGE}.training.loop", trees)
        ),
        "files of a step": len(step := files_of_a_step(read[DESIGN], sources)),
        "  their lines": sum(len(sources[path].splitlines()) for path in step),
        **{
            f"files that mention {key}": sum(
                bool(re.search(names, text)) for text in sources.values()
            )
            for key, names in SPREAD.items()
        },
    }


CODE_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def measure_grain(sources: Sources, nodes: Iterable[ast.AST]) -> dict[str, int]:
    """How dense the code is: its tokens, what a line and a function hold of them."""
    tokens = 0
    lines = 0
    named_found = 0
    for text in sources.values():
        of_file = [
            t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type in CODE_TOKENS
        ]
        tokens += len(of_file)
        lines += len({token.start[0] for token in of_file})
        named_found += sum(token.string == "found" for token in of_file)
    kinds: Counter[str] = Counter()
    cyclomatic = []
    for node in nodes:
        kinds["ternaries"] += isinstance(node, ast.IfExp)
        kinds["comprehensions"] += isinstance(node, COMPREHENSIONS)
        kinds["tuple assignments"] += _assigns_tuple(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            cyclomatic.append(1 + sum(isinstance(inner, BRANCHES) for inner in ast.walk(node)))
    cyclomatic.sort()
    percentiles = {
        f"cyclomatic number, p{p}": cyclomatic[len(cyclomatic) * p // 100] for p in (50, 90, 99)
    }
    return {
        "tokens": tokens,
        "tokens for 10 lines of code": round(10 * tokens / lines),
        **{
            f"{kind} for 1,000 lines": round(1000 * number / lines)
            for kind, number in kinds.items()
        },
        **percentiles,
        "functions over 10": sum(number > 10 for number in cyclomatic),
        "functions over 15": sum(number > 15 for number in cyclomatic),
        "`found` as a name": named_found,
    }


def _assigns_tuple(node: ast.AST) -> bool:
    """Whether it assigns several values in one statement."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def files_of_a_step(page: str, sources: Sources) -> set[str]:
    """The package's files that the design page names in the life of a step."""
    section = re.search(r"^## The life of a step$(.*?)(?=^## |\Z)", page, re.M | re.S)
    named = re.findall(r"`([\w/]+\.py)`", section.group(1)) if section else []
    return {f"{PACKAGE}/{name}" for name in named} & set(sources)


def count_small_with_one_importer(sources: Sources, trees: Mapping[str, ast.Module]) -> int:
    """Files under SMALL_LINES that exactly one other file imports."""
    importers: Counter[str] = Counter()
    for tree in trees.values():
        imports = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        ]
        names = {str(node.module) for node in imports}
        importers.update(
            names | {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        )
    small = [path for path, text in sources.items() if len(text.splitlines()) < SMALL_LINES]
    return sum(
        importers[_module_name(path)] == 1 for path in small if not path.endswith("__init__.py")
    )


def count_callers(trees: Iterable[ast.Module]) -> Counter[str]:
    """How many functions (or module bodies) use each name; a function's own recursion does not
    count.
    """
    used: Counter[str] = Counter()

    def names_in(node: ast.AST, inside: str) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                used.update(names_in(child, child.name) - {child.name})
            elif isinstance(child, ast.Name):
                found.add(child.id)
            elif isinstance(child, ast.Attribute):
                found |= {child.attr} | names_in(child, inside)
            else:
                found |= names_in(child, inside)
        return found

    for tree in trees:
        used.update(names_in(tree, ""))
    return used


def loaded_modules(module: str, trees: Mapping[str, ast.Module]) -> set[str]:
    """The package's modules that an import of `module` loads, through imports at the top of
    files.
    """
    by_name = {_module_name(path): tree for path, tree in trees.items()}
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in by_name:
            continue
        loaded.add(name)
        for node in by_name[name].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return loaded - {module}


def main() -> None:
    """Prints a column for each revision and one for the working tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    revisions = parser.parse_args().revisions
    for revision in revisions:
        if not _is_revision(revision):
            parser.error(f"{revision}: git knows no such revision; `git log --oneline` lists them")
    columns = {revision: measure(read_revision(revision)) for revision in revisions}
    columns["working tree"] = measure(read_working_tree())
    print(f"{'':40}" + "".join(f"{name:>14}" for name in columns))
    for count in columns["working tree"]:
        print(f"{count:40}" + "".join(f"{column[count]:>14,}" for column in columns.values()))


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def _is_revision(name: str) -> bool:
    asked = ["git", "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
