"""Chat templates compiled with a budget of work for each rendering.

A template comes with a model, from anywhere, and transformers' sandbox does not limit time and
memory. `{{ "a" * 10**10 }}`, a text doubled in a loop or a few nested loops would take all memory
or run forever. Here an operation is charged if its cost grows with its values, and it is charged
before it makes a large value. A rendering that exceeds MAX_WORK is refused. Any other renders as in
transformers.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
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

# The unit of work is a character that is read.
MAX_WORK = 2**30  # of one rendering; about a second
WRITE_COST = 4  # of a character that is made; so a rendering makes at most 2^28 characters
POINTER_COST = 8  # of an element, where a list is copied
ELEMENT_COST = 256  # of an element, where a list is iterated, read, or made from a text
CALL_COST = 2560  # of a call or a filter, besides the cost of its values
# characters that one character of a date's format can become, as in "%9999Y"
MAX_DATE_GROWTH = 256
MAX_TEMPLATE = 2**20  # characters
MAX_DIGITS = 1000  # of an integer
# Group 1: a width in the format itself, as in "%10d" and "{:10}". Group 2: a width that is one of
# the values, as in "%*d" and "{:{width}}".
WIDTH = re.compile(r"[%:.<>=^+ 0-](\d+)|(\*|\{[^{}]*\{)")
DICT_ATTRIBUTES = frozenset(dir(dict))
TEXTS = (str, bytes)
CONTAINERS = (list, tuple, dict, range)


def _raise_refusal(what: str) -> None:
    """Raises the error of a template that may not be rendered; `what` says what it does."""
    raise jinja2.TemplateRuntimeError(f"it {what}; use another chat template")


def _weigh(value: Any) -> int:
    """Returns the work of reading a value with all that it contains.

    A character of a text counts 1. An element of a list or mapping counts ELEMENT_COST besides its
    own weight, and a namespace CALL_COST besides its attributes. Any other value counts 0. A value
    that occurs twice counts twice. Counting stops above MAX_WORK, which also ends it for a list
    that contains itself.
    """
    if isinstance(value, str | bytes):
        return len(value)
    pending = [value]
    weight = 0
    while pending and weight <= MAX_WORK:
        part = pending.pop()
        if isinstance(part, TEXTS):
            weight += len(part)
            continue
        if isinstance(part, Namespace):
            weight = weight + CALL_COST
            part = part._Namespace__attrs
        if isinstance(part, CONTAINERS):
            weight += ELEMENT_COST * len(part)
            if isinstance(part, dict):
                pending += [*part, *part.values()]
            elif not isinstance(part, range):  # the numbers of a range weigh 0
                pending += part
    return weight


# Each `_size_*` takes the arguments of a method or filter, and estimates from above how many
# characters the call makes.
def _size_format(text: Any, *args: Any, **kwargs: Any) -> Any:
    """Bounds the text that `format` or % makes: any placeholder may write all values."""
    text = str(text)
    values = (*args, *kwargs.values())
    matches = list(WIDTH.finditer(text))
    widths = [int(match[1][:20]) for match in matches if match[1]]
    if any(match[2] for match in matches):  # any of the integers may be the width
        widths += [abs(value) for value in values if type(value) is int]
    placeholders = text.count("%") + text.count("{")
    return len(text) + sum(widths) + placeholders * sum(map(_weigh, values))


def _size_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> Any:
    """Bounds a text in which each `old` becomes `new`."""
    text = str(text)
    new = str(new)
    return len(text) + (text.count(str(old)) * len(new) if len(new) > 1 else 0)


def _size_join(separator: Any, parts: Any) -> Any:
    """Bounds all parts with a separator for each."""
    return _weigh(parts) + len(parts) * len(str(separator))


def _size_padded(text: Any, width: Any = 80, *_: Any, **__: Any) -> Any:
    """Bounds a value that is filled up to `width`."""
    return _weigh(text) + (abs(width) if isinstance(width, int) else 0)


def _size_indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    """Bounds a text whose lines or tabs are widened; `width` is a number, or a text to put in."""
    text = str(text)
    lines = text.count("\n") + text.count("\t") + 1
    return len(text) + lines * (width if isinstance(width, int) else len(width))


def _size_interspersed(text: Any, *args: Any, **kwargs: Any) -> Any:
    """Bounds a text in which all options, or a line break, may follow each character."""
    return len(str(text)) * (2 + sum(map(_weigh, (*args, *kwargs.values()))))


def _size_split(text: str, separator: Any = None, *_: Any, **__: Any) -> Any:
    """Bounds the parts of a text; each counts as many characters as make up ELEMENT_COST."""
    if isinstance(separator, str) and separator:
        parts = text.count(separator)
    else:
        parts = sum(map(text.count, " \t\r\n"))
    return len(text) + parts * ELEMENT_COST // WRITE_COST


def _size_json(value: Any, *_: Any, indent: Any = None, **__: Any) -> Any:
    """Bounds a value as JSON; `indent`, a number or a text, may be written for each character."""
    return _weigh(value) * (1 + (abs(indent) if isinstance(indent, int) else _weigh(indent)))


# method of a text or number -> bound on what it makes
METHODS: dict[str, Callable[..., Any]] = {
    "replace": _size_replace,
    "join": _size_join,
    "expandtabs": _size_indented,
    "translate": _size_interspersed,
    **dict.fromkeys(("split", "rsplit", "splitlines"), _size_split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _size_padded),
    **dict.fromkeys(("format", "format_map"), _size_format),
}
# filter -> bound on what it makes
FILTERS: dict[str, Callable[..., Any]] = {
    "replace": _size_replace,
    "join": lambda parts, d="", *_, **__: _size_join(d, parts),
    "indent": _size_indented,
    "wordwrap": _size_interspersed,
    "format": _size_format,
    "tojson": _size_json,
    "urlize": _size_interspersed,
    # A sum of lists copies the sum for each of them.
    "sum": lambda values, _=None, start=0: (
        0 if isinstance(start, int | float) else len(values) * _weigh(values)
    ),
    "round": lambda value, precision=0, *_: precision * precision,  # it computes 10**precision
    **dict.fromkeys(("center", "batch", "slice"), _size_padded),
}
# filters whose time does not depend on the size of their values
CONSTANT_TIME = frozenset(("length", "count", "first", "last", "default", "d"))
# filters that take each character of a text as an element
ITERATING_FILTERS = frozenset(
    ("list", "map", "select", "reject", "sort", "unique", "batch", "slice", "urlize", "wordwrap")
)
# Jinja's tests (`is eq`) whose time depends on the size of their values
COMPARING_TESTS = (
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
    """Inserts `charge_*` filters where a template compares, adds, joins, slices or iterates.

    Jinja's environment has no hook for these operations.
    """

    def visit(self, node: nodes.Node, *_: Any, **__: Any) -> Any:
        """Returns `node` with filters around the operands whose size costs time."""
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _charge("take", node.iter)
            case nodes.Compare():
                # A comparison with a constant reads no more than the constant's size; a search
                # reads all.
                sides = [node.expr, *(operand.expr for operand in node.ops)]
                if node.ops[0].op in ("in", "notin") or not any(
                    isinstance(side, nodes.Const) for side in sides
                ):
                    node.expr = _charge("read", node.expr)
                    for operand in node.ops:
                        kind = "search" if operand.op in ("in", "notin") else "read"
                        operand.expr = _charge(kind, operand.expr)
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
    """Puts the filter `charge_KIND` around an operand, unless it is a constant or an empty list."""
    is_short = isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and not node.items
    )
    if is_short:
        return node
    return nodes.Filter(node, f"charge_{kind}", [], [], None, None)


# Keyword arguments that Jinja adds to a call, and takes off again before it is made.
ADDED_BY_JINJA = ("_loop_vars", "_block_vars")


class _BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a budget of MAX_WORK for each rendering.

    Its `charge_*` methods are the filters that `_Charges` inserts: each charges for a value, and
    returns it.
    """

    intercepted_binops = frozenset(("*", "**", "%"))  # Jinja calls `call_binop` for these
    work = 0  # charged so far in the current rendering
    written = 0  # characters of the current rendering's text so far

    def _generate(self, source: nodes.Template, *names: Any, **options: Any) -> str:
        """Writes the Python code of a template, with the filters that charge."""
        return super()._generate(_Charges().visit(source), *names, **options)

    def charge(self, work: float) -> None:
        """Adds work that is about to be done to the current rendering's work.

        Raises `TemplateRuntimeError` if that exceeds the budget.
        """
        # A template may multiply a text by a negative number: that gives no work back.
        self.work += max(work, 0)  # type: ignore[assignment]
        if self.work > MAX_WORK:
            _raise_refusal("takes more time or memory than any conversation needs")

    def charge_read(self, value: Any) -> Any:
        """Charges for a value that is read as a whole."""
        self.charge(_weigh(value))
        return value

    def charge_search(self, value: Any) -> Any:
        """Charges for a value in which something is searched; a dict is free, being hashed."""
        if isinstance(value, dict):
            return value
        return self.charge_read(value)

    def charge_copy(self, value: Any) -> Any:
        """Charges for a value that is copied into another."""
        self.charge(WRITE_COST * _weigh(value))
        return value

    def charge_copy_part(self, value: Any) -> Any:
        """Charges for a slice, by its own length."""
        self.charge((WRITE_COST if isinstance(value, str | bytes) else POINTER_COST) * len(value))
        return value

    def charge_take(self, values: Any) -> Any:
        """Charges for the elements that a loop takes; an iterator becomes a list."""
        values = self.hold(values)
        self.charge(ELEMENT_COST * len(values))
        return values

    def hold(self, values: Any) -> Any:
        """Returns the values of an iterator as a list, so that they can be counted.

        Any other value is returned unchanged.
        """
        if not isinstance(values, Iterator):
            return values
        items = []
        for value in values:
            self.charge(ELEMENT_COST)
            items.append(value)
        return items

    def finalize(self, value: Any) -> Any:
        """Charges for a value that the template is about to write, and returns it.

        Jinja calls it for each expression, so it counts without a call of `charge`.
        """
        self.work += len(value) if type(value) is str else CALL_COST + WRITE_COST * _weigh(value)
        if self.work > MAX_WORK:
            self.charge(0)  # raises
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins pieces of text, such as those that a macro writes."""
        texts = list(pieces)
        self.charge(WRITE_COST * sum(map(len, texts)))
        return "".join(texts)

    def count_pieces(self, pieces: Iterable[str]) -> Iterator[str]:
        """Starts the budget of a rendering, and yields the pieces of its text.

        `written` counts their characters: transformers joins them while it renders, see `call`.
        """
        self.work = self.written = 0
        for piece in pieces:
            self.written += len(piece)
            yield piece

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charges for the result of a *, ** or %, and computes it.

        Raises `TemplateRuntimeError` for a number of more than about MAX_DIGITS digits.
        """
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            self.charge(WRITE_COST * _size_format(left, *values))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, Sized) and isinstance(times, int):
                    cost = WRITE_COST if isinstance(sequence, str | bytes) else POINTER_COST
                    self.charge(cost * len(sequence) * times)
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            if operator == "**":
                bits = left.bit_length() * right
            else:
                bits = left.bit_length() + right.bit_length()
            if bits > MAX_DIGITS * 3:  # a digit is about 3 bits
                _raise_refusal(f"computes a number of more than {MAX_DIGITS:,} digits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Charges for the call of a function or method, and makes it."""
        # The object of a method; the sandbox wraps the method `format`.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        __self.charge(CALL_COST)
        if isinstance(__obj, LoopContext):  # a recursive loop over other values
            args = (__self.charge_take(args[0]),)
        elif isinstance(owner, str | bytes | int | list | tuple | dict):
            args = tuple([__self.charge_read(__self.hold(value)) for value in args])
            own_kwargs = {
                name: __self.charge_read(value)
                for name, value in kwargs.items()
                if name not in ADDED_BY_JINJA
            }
            if not isinstance(owner, dict):
                __self.charge_read(owner)
            size = METHODS.get(__obj.__name__)
            if size is not None and not isinstance(owner, list | tuple | dict):
                __self.charge(WRITE_COST * size(owner, *args, **own_kwargs))
        elif getattr(__obj, "__name__", "") in ("strftime", "strftime_now"):
            __self.charge(
                WRITE_COST * MAX_DATE_GROWTH * sum(map(_weigh, (*args, *kwargs.values())))
            )
        elif (
            not isinstance(__obj, Macro) and getattr(__obj, "__name__", "") == "_generation_support"
        ):
            # {% generation %}: transformers joins all that was written, to know its length.
            __self.charge(__self.written // 32)
        return super().call(__context, __obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        return super().getitem(obj, self.charge_read(argument))  # the argument is hashed

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The base class gives the same value, but raises and catches an error for each
        # `message.role` on the way.
        if type(obj) is dict and attribute in obj and attribute not in DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter or test so that it charges for its values and its result.

        Filters of CONSTANT_TIME are returned unchanged.
        """
        if name in CONSTANT_TIME:
            return function
        size = FILTERS.get(name)
        # Jinja passes an environment or context before the values if it has this attribute.
        values_begin = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # copies `jinja_pass_arg` too
        def guarded(*args: Any, **kwargs: Any) -> Any:
            values = [self.hold(value) for value in args[values_begin:]]
            self.charge(CALL_COST + sum(map(_weigh, (*values[1:], *kwargs.values()))))
            by_character = name in ITERATING_FILTERS and isinstance(values[0], str)
            self.charge(_weigh(values[0]) * (ELEMENT_COST if by_character else 1))
            if size is not None:
                self.charge(WRITE_COST * size(*values, **kwargs))
            return self.hold(function(*args[:values_begin], *values, **kwargs))

        return guarded


DATE_VARIABLE = "chat_template_date"  # the variable with the date that a template gets as today's


@jinja2.pass_context
def strftime_now(context: Context, format: str) -> str:  # noqa: A002 - transformers' name
    """Formats the date of DATE_VARIABLE, or without one the present time."""
    date = context.get(DATE_VARIABLE)
    return (datetime.fromisoformat(date) if date else datetime.now()).strftime(format)


# transformers' function without its cache: each call makes a new environment.
_compile_unlimited = inspect.unwrap(chat_template_utils._compile_jinja_template)


@lru_cache
def compile_template(template: str) -> jinja2.Template:
    """Compiles a template in transformers' environment, with a budget for each rendering.

    Raises `UserError` if the template is not valid Jinja, too long or nested too deeply.
    """
    if len(template) > MAX_TEMPLATE:
        raise UserError(
            f"chat_template: longer than {MAX_TEMPLATE:,} characters; use another chat template"
        )
    # An environment of its own for each template, since it keeps count of what it renders.
    environment = _compile_unlimited("").environment
    environment.__class__ = _BudgetedEnvironment
    # `finalize` of the class counts; `lipsum` makes texts of any length.
    del environment.__dict__["finalize"], environment.globals["lipsum"]
    environment.globals["strftime_now"] = strftime_now
    environment.filters = {
        name: environment.guard(name, each) for name, each in environment.filters.items()
    }
    environment.filters |= {
        name: getattr(environment, name) for name in dir(environment) if name.startswith("charge_")
    }
    environment.tests |= {
        name: environment.guard(name, environment.tests[name]) for name in COMPARING_TESTS
    }
    try:
        compiled: jinja2.Template = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"chat_template: line {error.lineno}: not valid Jinja: {error.message}"
        ) from None
    except (RecursionError, SyntaxError, MemoryError, ValueError):
        # from Jinja's parser, or from compiling the Python code that it writes
        raise UserError("chat_template: nested too deeply; use another chat template") from None
    root = compiled.root_render_func
    compiled.root_render_func = lambda context: environment.count_pieces(root(context))
    return compiled


# transformers' own rendering (`apply_chat_template`) looks its compiler up by this name.
chat_template_utils._compile_jinja_template = compile_template
