"""Chat templates compiled with limits: transformers' own sandbox keeps them from the machine, not from its time and
memory.

A template comes with a model, from anywhere. `{{ "a" * 10**10 }}`, a text doubled in a loop or a few nested loops would
take all memory, or run forever. Here every operation that makes a longer text is checked before it is carried out, and
the steps of loops and calls are counted. What passes renders as transformers renders it.
"""

import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import lru_cache, reduce, wraps
from itertools import chain, islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from finetune.errors import UserError

MAX_CHARACTERS = 2**26  # of a text that a template makes; also elements of a list
MAX_STEPS = 5_000_000  # of one rendering: elements of all loops, and ten for a call or a filter
MAX_DIGITS = 1000  # of an integer
MAX_PARTS = 100_000  # in a list or mapping that a template builds, those inside of it counted
WIDE_FORMAT = re.compile(r"[%:.<>=^+ 0-]\d{7,}")  # in "%10000000d" and "{:10000000}"
DICT_ATTRIBUTES = frozenset(dir(dict))


def _refuse(what: str) -> None:
    raise jinja2.TemplateRuntimeError(f"it {what}; use another chat template")


def _limit(size: float) -> None:
    if size > MAX_CHARACTERS:
        _refuse(f"makes a text of more than {MAX_CHARACTERS:,} characters")


def _limit_pieces(pieces: Iterable[str], at_once: int = 100) -> Iterator[str]:
    size, left = 0, iter(pieces)
    while some := list(islice(left, at_once)):
        size += sum(map(len, some))
        _limit(size)
        yield from some


def _limit_format(text: Any, *values: Any, **named: Any) -> None:
    if WIDE_FORMAT.search(str(text)):
        _limit(math.inf)
    for value in (*values, *named.values()):
        if type(value) is int:
            _limit(abs(value))


def _limit_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, new = str(text), str(new)
    if len(text) * len(new) > MAX_CHARACTERS:
        _limit(len(text) + text.count(str(old)) * len(new))


def _limit_width(text: Any, width: int = 80, *_: Any, **__: Any) -> None:
    _limit(width)


def _limit_lines(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(text)
    _limit((text.count("\n") + text.count("\t") + 1) * (width if isinstance(width, int) else len(width)))


def _limit_words(text: Any, width: int = 79, _: bool = True, wrapstring: str | None = None, *__: Any) -> None:
    text = str(text)
    _limit((len(text) // max(1, width) + text.count("\n") + 1) * len(wrapstring or "\n"))


def _limit_join(separator: Any, parts: Any) -> None:
    _limit(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(parts) * len(str(separator)))


def _limit_translate(text: str, table: Any) -> None:
    values = table.values() if isinstance(table, dict) else table if isinstance(table, list | tuple) else ()
    _limit(len(text) * max((len(value) for value in values if isinstance(value, str)), default=0))


def _limit_urls(text: Any, *options: Any, **named: Any) -> None:
    text, options = str(text), (*options, *named.values())
    size = sum(len(option) for option in options if isinstance(option, Sized))
    _limit(len(text) + sum(map(text.count, ".:@")) * size)


def _limit_split(text: str, separator: Any = None, *_: Any, **__: Any) -> None:
    parts = text.count(separator) if isinstance(separator, str) and separator else sum(map(text.count, " \t\r\n"))
    if parts > MAX_STEPS:
        _refuse(f"makes a list of more than {MAX_STEPS:,} elements")


def _limit_indent(value: Any, *_: Any, indent: Any = None, **__: Any) -> None:
    _limit(indent * MAX_PARTS if isinstance(indent, int) else 0)


# What is asked before a method of a text, or a filter, is called with the same arguments.
METHODS: dict[str, Callable[..., None]] = {
    "replace": _limit_replace,
    "join": _limit_join,
    "expandtabs": _limit_lines,
    "translate": _limit_translate,
    **dict.fromkeys(("split", "rsplit", "splitlines"), _limit_split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _limit_width),
    **dict.fromkeys(("format", "format_map"), _limit_format),
}
FILTERS: dict[str, Callable[..., None]] = {
    "replace": _limit_replace,
    "join": lambda parts, d="", *_, **__: _limit_join(d, parts),
    "indent": _limit_lines,
    "wordwrap": _limit_words,
    "format": _limit_format,
    "tojson": _limit_indent,
    "urlize": _limit_urls,
    **dict.fromkeys(("center", "batch", "slice"), _limit_width),
}

AT_ONCE = frozenset(("length", "count", "first", "last", "default", "d"))  # filters whose time no value lengthens
BY_CHARACTER = frozenset(("list", "map", "select", "reject", "sort", "unique", "batch", "slice", "urlize", "wordwrap"))


class _Code(CodeGenerator):
    """`+`, `~` and built lists go through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._wrap("concat(map(str, (", ")))", node.nodes, frame)

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:  # type: ignore[override]  # noqa: N802
        values, first = [node.right], node.left
        while isinstance(first, nodes.Add):
            values, first = [*values, first.right], first.left
        self._wrap("add(", ")", [first, *values[::-1]], frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._wrap("limit_parts([", "])", node.items, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._wrap("limit_parts((", "))", node.items, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.limit_parts(")
        super().visit_Dict(node, frame)
        self.write(")")

    def _wrap(self, before: str, after: str, items: Iterable[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{before}")
        for item in items:
            self.visit(item, frame)
            self.write(", ")
        self.write(after)


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _generate(self, source: nodes.Template, *names: Any, **options: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "count_steps", [], [], None, None)
        return super()._generate(source, *names, **options)

    def concat(self, pieces: Iterable[str]) -> str:
        some = list(islice(left := iter(pieces), 100))
        if len(some) == 100:
            return "".join(_limit_pieces(chain(some, left)))
        if sum(map(len, some)) > MAX_CHARACTERS:
            _limit(math.inf)
        return "".join(some)

    @staticmethod
    def add(*values: Any) -> Any:
        """The sum of `values`, of which there are many in a template: nearly always texts."""
        try:
            _limit(sum(map(len, values)))
            return "".join(values)
        except TypeError:
            return reduce(operator.add, values)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _limit_format(left, *(right if isinstance(right, tuple) else (right,)))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(other, int):
                    _limit(len(one) * other)
        if isinstance(left, int) and isinstance(right, int) and operator in "**":
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_DIGITS * 3:
                _refuse(f"computes a number of more than {MAX_DIGITS:,} digits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        own = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `format`
        steps = len(args[0]) if isinstance(__obj, LoopContext) else _count_parts(own)
        __self.add_steps(__context, 10 + steps)
        if isinstance(own, str | bytes | int) and (limit := METHODS.get(__obj.__name__)) is not None:
            limit(own, *map(_hold, args), **{name: value for name, value in kwargs.items() if name[0] != "_"})
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.limit_parts(result) if isinstance(result, dict) else result

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The same value as below, without an exception on the way for each `message.role`.
        if type(obj) is dict and attribute in obj and attribute not in DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def add_steps(self, context: Context, count: int) -> None:
        steps = context.__dict__.get("steps", 0) + count
        context.__dict__["steps"] = steps
        if steps > MAX_STEPS:
            _refuse(f"takes more than {MAX_STEPS:,} steps for one conversation")

    @staticmethod
    def limit_parts(value: Any) -> Any:
        """`value`, unless it holds itself so often that its text would have no end."""
        left, count = [value], 0
        while left:
            part = left.pop()
            if isinstance(part, list | tuple | dict):
                count += len(part)
                if count > MAX_PARTS:
                    _refuse(f"builds a list of more than {MAX_PARTS:,} parts")
                left += part.values() if isinstance(part, dict) else part
        return value


def _hold(values: Any) -> Any:
    """`values`, as a list where a filter makes them one by one."""
    if not isinstance(values, Iterator):
        return values
    held = list(islice(values, MAX_STEPS + 1))
    if len(held) > MAX_STEPS:
        _refuse(f"makes a list of more than {MAX_STEPS:,} elements")
    return held


@jinja2.pass_context
def _count_steps(context: Context, values: Any) -> Any:
    """`values`, which a loop is about to take, counted."""
    held = _hold(values)
    context.environment.add_steps(context, len(held))  # type: ignore[attr-defined]
    return held


def _count_parts(value: Any, by_character: bool = False) -> int:
    """The steps that count for a filter or a method that reads the whole of `value`."""
    if isinstance(value, str | bytes):
        return len(value) // (1 if by_character else 256)
    return len(value) // 10 if isinstance(value, list | tuple | dict | range) else 0


def _guard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, with its steps counted and its arguments limited."""
    limit, wanted = FILTERS.get(name), getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    @wraps(function)
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        environment: Any = context.environment
        if name not in AT_ONCE:
            environment.add_steps(context, 10 + _count_parts(value, name in BY_CHARACTER))
        if limit is not None:
            limit(value := _hold(value), *args, **kwargs)
        given = {"context": context, "eval_context": context.eval_ctx, "environment": environment}
        result = function(*([given[wanted.name]] if wanted else []), value, *args, **kwargs)
        return _count_each(context, result) if isinstance(result, Iterator) else result

    return guarded


def _count_each(context: Context, values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        context.environment.add_steps(context, 2)  # type: ignore[attr-defined]
        yield value


_compile_unlimited = inspect.unwrap(chat_template_utils._compile_jinja_template)


@lru_cache
def compile_template(template: str) -> jinja2.Template:
    """The template in transformers' environment, with limits. Raises `UserError` where it is not valid Jinja."""
    environment = _compile_unlimited("").environment  # one of its own: it keeps track of what it renders
    environment.__class__ = _LimitedEnvironment
    del environment.globals["lipsum"]
    environment.filters = {name: _guard(name, function) for name, function in environment.filters.items()}
    environment.filters["count_steps"] = _count_steps
    try:
        compiled: jinja2.Template = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"chat_template: line {error.lineno}: not valid Jinja: {error.message}") from None
    except (RecursionError, SyntaxError, MemoryError, ValueError):  # of the parser, or of the Python that it writes
        raise UserError("chat_template: nested too deeply; use another chat template") from None
    if "generation" in template:  # transformers joins the pieces itself
        root = compiled.root_render_func
        compiled.root_render_func = lambda context: _limit_pieces(root(context), at_once=1)
    return compiled


# transformers' own rendering (`apply_chat_template`) compiles by this name.
chat_template_utils._compile_jinja_template = compile_template
