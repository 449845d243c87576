"""Chat templates compiled with a budget: transformers' sandbox does not guard the machine's time
and memory.

A template comes with a model, from anywhere. `{{ "a" * 10**10 }}`, a text doubled in a loop or a
few nested loops would take all memory, or run forever. Here every operation whose cost grows with
its values says what it will cost before it is carried out, and one rendering has MAX_WORK to spend.
What passes renders as transformers renders it.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from finetune.errors import UserError

MAX_WORK = 2**30  # of one rendering, in characters that are read; about a second
# what a character that is made costs; so a template makes texts of 2^28 characters together
MADE = 4
POINTER = 8  # what an element costs where a list is copied
# what an element costs of a loop, of a list that is read, and of one that is made of a text
ELEMENT = 256
CALL = 2560  # what a call or a filter costs, whatever its values
# the characters that Python lets a character of a date's format become, such as in "%9999Y"
STRFTIME = 256
MAX_TEMPLATE = 2**20  # characters
MAX_DIGITS = 1000  # of an integer
# in "%10d" and "{:10}"; in "%*d" and "{:{width}}"
WIDTH = re.compile(r"[%:.<>=^+ 0-](\d+)|(\*|\{[^{}]*\{)")
DICT_ATTRIBUTES = frozenset(dir(dict))
TEXTS = (str, bytes)
PARTED = (list, tuple, dict, range)


def _refuse(what: str) -> None:
    raise jinja2.TemplateRuntimeError(f"it {what}; use another chat template")


def _weigh(value: Any) -> int:
    """Counts the characters of a value: those of a text, or those that a list or mapping would
    have as text. A part that occurs twice counts twice.
    """
    if isinstance(value, str | bytes):
        return len(value)
    left = [value]
    weight = 0
    while left and weight <= MAX_WORK:
        part = left.pop()
        if isinstance(part, TEXTS):
            weight += len(part)
            continue
        if isinstance(part, Namespace):
            weight = weight + CALL
            part = part._Namespace__attrs
        if isinstance(part, PARTED):
            weight += ELEMENT * len(part)
            if isinstance(part, dict):
                left += [*part, *part.values()]
            elif not isinstance(part, range):  # whose numbers weigh nothing more
                left += part
    return weight


# Each of these bounds the characters that an operation makes of the values it is called with.
def _size_format(text: Any, *values: Any, **named: Any) -> Any:
    text = str(text)
    given = (*values, *named.values())
    widths = [int(match[1][:20]) if match[1] else math.inf for match in WIDTH.finditer(text)]
    numbers = []
    if math.inf in widths:
        numbers = [abs(value) for value in given if type(value) is int]
    wide = sum(width for width in (*widths, *numbers) if width < math.inf)
    return len(text) + wide + (text.count("%") + text.count("{")) * sum(map(_weigh, given))


def _size_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> Any:
    text = str(text)
    new = str(new)
    return len(text) + (text.count(str(old)) * len(new) if len(new) > 1 else 0)


def _size_join(separator: Any, parts: Any) -> Any:
    return _weigh(parts) + len(parts) * len(str(separator))


def _size_width(text: Any, width: Any = 80, *_: Any, **__: Any) -> Any:
    return _weigh(text) + (abs(width) if isinstance(width, int) else 0)


def _size_lines(text: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    text = str(text)
    lines = text.count("\n") + text.count("\t") + 1
    return len(text) + lines * (width if isinstance(width, int) else len(width))


def _size_words(
    text: Any, width: int = 79, _: bool = True, wrapstring: str | None = None, *__: Any
) -> Any:
    text = str(text)
    return len(text) + (len(text) // max(1, width) + text.count("\n") + 1) * len(wrapstring or "\n")


def _size_translate(text: str, table: Any) -> Any:
    values: Iterable[Any] = ()
    if isinstance(table, dict):
        values = table.values()
    elif isinstance(table, list | tuple):
        values = table
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def _size_urls(text: Any, *options: Any, **named: Any) -> Any:
    text = str(text)
    return len(text) + sum(map(text.count, ".:@")) * sum(map(_weigh, (*options, *named.values())))


def _size_split(text: str, separator: Any = None, *_: Any, **__: Any) -> Any:
    if isinstance(separator, str) and separator:
        parts = text.count(separator)
    else:
        parts = sum(map(text.count, " \t\r\n"))
    return len(text) + parts * ELEMENT // MADE


def _size_json(value: Any, *_: Any, indent: Any = None, **__: Any) -> Any:
    return _weigh(value) * (1 + (abs(indent) if isinstance(indent, int) else _weigh(indent)))


METHODS: dict[str, Callable[..., Any]] = {
    "replace": _size_replace,
    "join": _size_join,
    "expandtabs": _size_lines,
    "translate": _size_translate,
    **dict.fromkeys(("split", "rsplit", "splitlines"), _size_split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _size_width),
    **dict.fromkeys(("format", "format_map"), _size_format),
}
FILTERS: dict[str, Callable[..., Any]] = {
    "replace": _size_replace,
    "join": lambda parts, d="", *_, **__: _size_join(d, parts),
    "indent": _size_lines,
    "wordwrap": _size_words,
    "format": _size_format,
    "tojson": _size_json,
    "urlize": _size_urls,
    "sum": lambda values, _=None, start=0: (
        0 if isinstance(start, int | float) else len(values) * _weigh(values)
    ),
    "round": lambda value, precision=0, *_: precision * precision,  # of 10 to this power
    **dict.fromkeys(("center", "batch", "slice"), _size_width),
}
# filters whose time no value lengthens
AT_ONCE = frozenset(("length", "count", "first", "last", "default", "d"))
BY_CHARACTER = frozenset(
    ("list", "map", "select", "reject", "sort", "unique", "batch", "slice", "urlize", "wordwrap")
)
COMPARING = (
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    ">=",
    "ge",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
    "lower",
    "upper",
)


class _Charges(NodeTransformer):
    """Puts filters that charge for a value where a template compares, joins, slices or iterates."""

    def visit(self, node: nodes.Node, *_: Any, **__: Any) -> Any:
        """Returns `node` with filters around the operands whose size costs time."""
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _charge("take", node.iter)
            case nodes.Compare():
                sides = [node.expr, *(operand.expr for operand in node.ops)]
                if node.ops[0].op in ("in", "notin") or not any(
                    isinstance(side, nodes.Const) for side in sides
                ):
                    node.expr = _charge("read", node.expr)
                    for operand in node.ops:
                        operand.expr = _charge(
                            "search" if operand.op in ("in", "notin") else "read", operand.expr
                        )
            case nodes.Add():
                node.left = _charge("copy", node.left)
                node.right = _charge("copy", node.right)
            case nodes.Concat():
                node.nodes = [_charge("copy", each) for each in node.nodes]
            case nodes.Dict():
                for pair in node.items:
                    pair.key = _charge("read", pair.key)  # it is hashed
            case nodes.Getitem() if isinstance(node.arg, nodes.Slice):
                return _charge("copy_part", node)
        return node


def _charge(kind: str, node: Any) -> Any:
    """Puts the filter `charge_KIND` around an operand; one that is a constant or empty is free."""
    is_short = isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and not node.items
    )
    if is_short:
        return node
    return nodes.Filter(node, f"charge_{kind}", [], [], None, None)


class _BudgetedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))
    work = 0  # of the rendering that is under way
    written = 0  # characters of its text so far

    def _generate(self, source: nodes.Template, *names: Any, **options: Any) -> str:
        return super()._generate(_Charges().visit(source), *names, **options)

    def charge(self, work: float) -> None:
        """Counts work that is about to be done.

        Raises `TemplateRuntimeError` where the budget is spent.
        """
        self.work += work  # type: ignore[assignment]
        if self.work > MAX_WORK:
            _refuse("takes more time or memory than any conversation needs")

    def charge_read(self, value: Any) -> Any:
        self.charge(_weigh(value))
        return value

    def charge_search(self, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        return self.charge_read(value)

    def charge_copy(self, value: Any) -> Any:
        self.charge(MADE * (len(value) if type(value) is str else _weigh(value)))
        return value

    def charge_copy_part(self, value: Any) -> Any:
        self.charge((MADE if isinstance(value, str | bytes) else POINTER) * len(value))
        return value

    def charge_take(self, values: Any) -> Any:
        values = self.hold(values)
        self.charge(ELEMENT * len(values))
        return values

    def hold(self, values: Any) -> Any:
        """`values`, as a list where they are made one by one."""
        if not isinstance(values, Iterator):
            return values
        held = []
        for value in values:
            self.charge(ELEMENT)
            held.append(value)
        return held

    def finalize(self, value: Any) -> Any:
        """`value`, which is about to be written."""
        self.work += len(value) if type(value) is str else CALL + MADE * _weigh(value)
        if self.work > MAX_WORK:
            self.charge(0)
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        held = list(pieces)
        self.charge(MADE * sum(map(len, held)))
        return "".join(held)

    def write(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of the whole text, which are counted: transformers joins some of them
        itself.
        """
        self.work = self.written = 0
        for piece in pieces:
            self.written += len(piece)
            yield piece

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self.charge(
                MADE * _size_format(left, *(right if isinstance(right, tuple) else (right,)))
            )
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(other, int):
                    self.charge(
                        (MADE if isinstance(one, str | bytes) else POINTER) * len(one) * other
                    )
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            if operator == "**":
                bits = left.bit_length() * right
            else:
                bits = left.bit_length() + right.bit_length()
            if bits > MAX_DIGITS * 3:
                _refuse(f"computes a number of more than {MAX_DIGITS:,} digits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # the sandbox wraps `format`
        own = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        __self.charge(CALL)
        if isinstance(__obj, LoopContext):
            args = (__self.charge_take(args[0]),)
        elif isinstance(own, str | bytes | int | list | tuple | dict):
            held = [__self.charge_read(__self.hold(value)) for value in args]
            given = {
                name: __self.charge_read(value) for name, value in kwargs.items() if name[0] != "_"
            }
            if not isinstance(own, dict):
                __self.charge_read(own)
            if (size := METHODS.get(__obj.__name__)) is not None and not isinstance(
                own, list | tuple | dict
            ):
                __self.charge(MADE * size(own, *held, **given))
            args = tuple(held)
        elif getattr(__obj, "__name__", "") in ("strftime", "strftime_now"):
            __self.charge(MADE * STRFTIME * sum(map(_weigh, (*args, *kwargs.values()))))
        elif (
            not isinstance(__obj, Macro) and getattr(__obj, "__name__", "") == "_generation_support"
        ):
            # transformers joins all that was written, to know its length
            __self.charge(__self.written // 32)
        return super().call(__context, __obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        return super().getitem(obj, self.charge_read(argument))  # which is hashed

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The same value as below, without an exception on the way for each `message.role`.
        if type(obj) is dict and attribute in obj and attribute not in DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter or test `function`, which pays for its values and its result."""
        if name in AT_ONCE:
            return function
        size = FILTERS.get(name)
        first = 1
        if getattr(function, "jinja_pass_arg", None) is None:
            first = 0

        @wraps(function)  # what jinja is to pass first is an attribute of the function
        def guarded(*args: Any, **kwargs: Any) -> Any:
            given = [self.hold(value) for value in args[first:]]
            self.charge(CALL + sum(map(_weigh, (*given[1:], *kwargs.values()))))
            by_character = name in BY_CHARACTER and isinstance(given[0], str)
            self.charge(_weigh(given[0]) * (ELEMENT if by_character else 1))
            if size is not None:
                self.charge(MADE * size(*given, **kwargs))
            return self.hold(function(*args[:first], *given, **kwargs))

        return guarded


_compile_unlimited = inspect.unwrap(chat_template_utils._compile_jinja_template)


@lru_cache
def compile_template(template: str) -> jinja2.Template:
    """The template in transformers' environment, with a budget.

    Raises `UserError` where it is not valid Jinja.
    """
    if len(template) > MAX_TEMPLATE:
        raise UserError(
            f"chat_template: longer than {MAX_TEMPLATE:,} characters; use another chat template"
        )
    # one of its own: it keeps track of what it renders
    environment = _compile_unlimited("").environment
    environment.__class__ = _BudgetedEnvironment
    del environment.__dict__["finalize"], environment.globals["lipsum"]
    environment.filters = {
        name: environment.guard(name, each) for name, each in environment.filters.items()
    }
    environment.filters |= {
        name: getattr(environment, name) for name in dir(environment) if name.startswith("charge_")
    }
    environment.tests |= {
        name: environment.guard(name, environment.tests[name]) for name in COMPARING
    }
    try:
        compiled: jinja2.Template = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"chat_template: line {error.lineno}: not valid Jinja: {error.message}"
        ) from None
    except (RecursionError, SyntaxError, MemoryError, ValueError):
        # of the parser, or of the Python that it writes
        raise UserError("chat_template: nested too deeply; use another chat template") from None
    root = compiled.root_render_func
    compiled.root_render_func = lambda context: environment.write(root(context))
    return compiled


# transformers' own rendering (`apply_chat_template`) compiles by this name.
chat_template_utils._compile_jinja_template = compile_template
