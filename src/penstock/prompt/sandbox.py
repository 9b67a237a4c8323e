"""A Jinja environment for templates that nobody here wrote: bounded in time and memory, and able to tell a template
that only prints a text from one that looks at it.

Both need the same places to stand: every loop, call, filter, test and operator of a template passes through here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MAX_INTEGER_BITS = 4_096
_HASHED_ALIKE = 2**61 - 1  # Python hashes all multiples of it alike: a dict of them takes quadratic time
_STEPS_HASHED_ALIKE = 400  # of such a number: a rendering can afford some hundreds
_MAX_INDENT = 16
_READ_PER_BUILT = 4  # characters that are looked through for the price of one that is built
_VARIABLES_OF_JINJA = frozenset({"_loop_vars", "_block_vars"})  # it adds them to calls, and takes them away again


class Inspected(BaseException):
    """A template looked at an opaque text. Not an Exception, so that no filter can swallow it."""


class Budget:
    """What one rendering may still spend; everything it does and every text it builds is paid for, once."""

    def __init__(self, *, steps: int, characters: int) -> None:
        self._steps = self._max_steps = steps
        self._characters = self._max_characters = characters
        self.was_inspected = False

    def spend(self, *, steps: int = 0, characters: int = 0) -> None:
        self._steps -= steps
        self._characters -= characters
        if self._steps < 0:
            raise SecurityError(f"it takes more than {self._max_steps:,} steps")
        if self._characters < 0:
            raise SecurityError(f"it builds or reads more than {self._max_characters:,} characters")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def spending(budget: Budget) -> Generator[None]:
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


class Opaque(str):
    """A text that can be printed and joined to others; any attempt to look into it is recorded and refused.

    It counts as true, because it stands for every text that is not empty.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: Any) -> Any:
        return Opaque(str.__add__(self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Opaque(str.__add__(other, self)) if isinstance(other, str) else NotImplemented


def _refuse_inspection(*_: Any, **__: Any) -> NoReturn:
    _budget.get().was_inspected = True
    raise Inspected


_UNTOUCHED = {*dir(object), "__add__"} - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}
_UNTOUCHED -= {"__format__", "__repr__", "__reduce__", "__reduce_ex__", "__sizeof__"}
for _name in {*dir(str), "__rmod__", "__rmul__", "__reversed__"} - _UNTOUCHED:
    setattr(Opaque, _name, _refuse_inspection)


def length(text: str) -> int:
    return str.__len__(text)


def leaves(value: Any) -> Iterator[Any]:
    """Everything inside nested containers; a shared part is visited, and paid for, each time."""
    _budget.get().spend(steps=1)
    if isinstance(value, Mapping):
        value = value.items()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Iterator, Namespace)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _holds_opaque(*values: Any) -> bool:
    # Counted to the end, so that large structures are paid for even where the answer comes early.
    return sum(_pay_for_reading(value) for value in values) > 0


def _pay_for_reading(value: Any) -> int:
    """Pays for what is about to be searched, compared or hashed, by its length; returns how much of it is opaque."""
    num_opaque = 0
    for leaf in leaves(value):
        if isinstance(leaf, str):
            _budget.get().spend(characters=length(leaf) // _READ_PER_BUILT)
            num_opaque += isinstance(leaf, Opaque)
        elif isinstance(leaf, (int, float)) and abs(leaf) >= _HASHED_ALIKE:
            _budget.get().spend(steps=_STEPS_HASHED_ALIKE)
    return num_opaque


def _paid(result: Any) -> Any:
    if isinstance(result, str):
        _budget.get().spend(characters=length(result))
    elif isinstance(result, (list, tuple)):
        _budget.get().spend(steps=len(result))
    return result


def concat(parts: Iterable[Any]) -> str:
    """Printed parts as one text, which is opaque if one of them is."""
    texts = [part if isinstance(part, str) else str(printed(part)) for part in parts]
    _budget.get().spend(characters=sum(map(length, texts)))
    joined = "".join(texts)
    return Opaque(joined) if any(isinstance(text, Opaque) for text in texts) else joined


def printed(value: Any) -> Any:
    """Called on all that is printed; a container's text can be far longer than what the template built."""
    if not isinstance(value, str):
        for leaf in leaves(value):
            if isinstance(leaf, str):
                _budget.get().spend(characters=length(leaf))
    return value


def counted(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _budget.get().spend(steps=1)
        yield item


def compared(value: Any) -> Any:
    """An operand of a comparison. `in` would read an opaque text without asking it."""
    if isinstance(value, Opaque):
        _refuse_inspection()
    _pay_for_reading(value)
    return value


# What may be done to texts without making them longer; the rest is priced before it is done, or not offered.
_TEXT_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper",
))  # fmt: skip
_UNOFFERED_FILTERS = ("batch", "center", "forceescape", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
_WIDE_FIELD = re.compile(r"\d{3}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


# Prices take the arguments of the filters that they are for, under the same names.


def _price_of_replace(s: Any, old: Any, new: Any, count: Any = None) -> int:
    return length(str(s)) + str(s).count(str(old)) * length(str(new))


def _price_of_join(value: Any, d: Any = "", attribute: Any = None) -> int:
    return sum(length(str(item)) + length(str(d)) for item in value)


def _price_of_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    width = length(width) if isinstance(width, str) else int(width)
    return length(str(s)) + (str(s).count("\n") + 1) * width


def _price_of_format(value: Any, *args: Any, **kwargs: Any) -> int:
    if _WIDE_FIELD.search(str(value)):
        raise SecurityError("it formats fields of 100 or more characters")
    num_fields = str(value).count("%") + str(value).count("{")
    return length(str(value)) + num_fields * (100 + sum(length(str(arg)) for arg in (*args, *kwargs.values())))


_PRICES_OF_FILTERS: dict[str, Callable[..., int]] = {
    "format": _price_of_format,
    "indent": _price_of_indent,
    "join": _price_of_join,
    "replace": _price_of_replace,
}
_PRICES_OF_METHODS: dict[str, Callable[..., int]] = {
    "format": _price_of_format,
    "join": lambda separator, items: _price_of_join(items, separator),
    "replace": _price_of_replace,
}


# Filters that handle the items of a container one by one, so that an opaque text may be among them.
_ITEMWISE_FILTERS = frozenset((
    "count", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse", "select",
    "selectattr",
))  # fmt: skip
_PASSING_FILTERS = frozenset({"compared", "concat", "counted", "d", "default", "string"})
# The answer is the same for every text.
_TESTS_OF_TYPE = {
    "boolean": False, "callable": False, "defined": True, "false": False, "float": False, "integer": False,
    "iterable": True, "mapping": False, "none": False, "number": False, "sequence": True, "string": True,
    "true": False, "undefined": False,
}  # fmt: skip


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # which also keeps the mark by which Jinja passes its own first argument
    def guarded(*args: Any, **kwargs: Any) -> Any:
        own = 1 if args and _is_jinja_state(args[0]) else 0
        subject, *others = [_materialized(name, value) for value in args[own:]]
        if _looks_at_opaque(name, subject, [*others, *kwargs.values()]):
            _refuse_inspection()
        if name in _PRICES_OF_FILTERS:
            _budget.get().spend(characters=_PRICES_OF_FILTERS[name](subject, *others, **kwargs))
        return _paid(function(*args[:own], subject, *others, **kwargs))

    return guarded


def _looks_at_opaque(name: str, subject: Any, others: list[Any]) -> bool:
    if name in _PASSING_FILTERS:
        return False
    if name in _ITEMWISE_FILTERS:
        return isinstance(subject, Opaque) or _holds_opaque(*others)
    return _holds_opaque(subject, *others)


def _materialized(name: str, value: Any) -> Any:
    lazy = isinstance(value, Iterator) and name not in _ITEMWISE_FILTERS | _PASSING_FILTERS
    return list(counted(value)) if lazy else value


def _guarded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        subject = args[1 if _is_jinja_state(args[0]) else 0]
        if name in _TESTS_OF_TYPE:
            return _TESTS_OF_TYPE[name] if isinstance(subject, Opaque) else function(*args, **kwargs)
        if _holds_opaque(*[arg for arg in args if not _is_jinja_state(arg)], *kwargs.values()):
            _refuse_inspection()
        return function(*args, **kwargs)

    return guarded


def _is_jinja_state(value: Any) -> bool:
    return isinstance(value, (Context, nodes.EvalContext, ImmutableSandboxedEnvironment))


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as models were trained on it: without HTML escapes."""
    if indent is not None and int(indent) > _MAX_INDENT:
        raise SecurityError(f"it indents JSON by {indent}; {_MAX_INDENT} is the most")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return concat(_paid(part) for part in encoder.iterencode(value))


def raise_exception(message: Any) -> NoReturn:
    raise TemplateError("".join([str(message)]))  # a plain text, even if part of it is opaque


def strftime_now(form: str) -> str:
    if length(form) > 100 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise SecurityError("it asks for a date with padding")
    return datetime.now().strftime(form)


class Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is simply printed."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Hooks(NodeTransformer):
    """Leads loops, `~`, comparisons and keys, which compile to plain Python, through filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "compared")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "compared")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _filtered(node.key, "compared")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # which would run parts of the template before there is a budget
            finalize=printed,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        for name in _UNOFFERED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": to_json, "counted": counted, "concat": concat, "compared": compared}
        self.filters = {name: _guarded_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _guarded_test(name, function) for name, function in self.tests.items()}
        self.globals = {**self.globals, "raise_exception": raise_exception, "strftime_now": strftime_now}
        del self.globals["lipsum"]

    def template(self, source: str) -> Template:
        hooked = _Hooks().visit(self.parse(source))
        return Template.from_code(self, self.compile(hooked), self.make_globals(None))

    def variables(self, source: str) -> frozenset[str]:
        return frozenset(meta.find_undeclared_variables(self.parse(source))) - self.globals.keys()

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(list(counted(arg)) if isinstance(arg, Iterator) else arg for arg in args)
        _budget.get().spend(steps=1)
        if __obj in (Namespace, dict):  # which hash the keys of what they are given
            _pay_for_reading(args)
        elif not isinstance(__obj, Macro) and __obj is not raise_exception:
            given = {name: value for name, value in kwargs.items() if name not in _VARIABLES_OF_JINJA}
            if _holds_opaque(*args, *given.values()):
                _refuse_inspection()
            _pay_for_method(getattr(__obj, "__wrapped__", __obj), args, given)
        return _paid(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _pay_for_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, Opaque):
            _refuse_inspection()
        if isinstance(argument, tuple):
            _pay_for_reading(argument)
        return _paid(super().getitem(obj, argument)) if isinstance(argument, slice) else super().getitem(obj, argument)


def _pay_for_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, (list, tuple, dict, range)):
        _pay_for_reading(args)
        _budget.get().spend(steps=len(owner))  # which it may go through, as count and copy do
    if not isinstance(owner, str) or isinstance(owner, Opaque):
        return
    if name in _PRICES_OF_METHODS:
        _budget.get().spend(characters=_PRICES_OF_METHODS[name](owner, *args, **kwargs))
    elif name not in _TEXT_METHODS:
        raise SecurityError(f"it calls the text method {name}, which is not offered")
    elif name not in ("startswith", "endswith"):
        _pay_for_reading(owner)


def _pay_for_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        if _holds_opaque(left, right):
            _refuse_inspection()
        values = right if isinstance(right, tuple) else (right,)
        _budget.get().spend(characters=_price_of_format(left, *values))
    elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _budget.get().spend(characters=_size(left) + _size(right))
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        _refuse_large_integer(left.bit_length() + right.bit_length())
    elif operator == "*" and isinstance(left, (str, list, tuple)) != isinstance(right, (str, list, tuple)):
        sequence, times = (left, right) if isinstance(left, (str, list, tuple)) else (right, left)
        _budget.get().spend(characters=_size(sequence) * max(int(times), 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _refuse_large_integer(left.bit_length() * max(right, 0))


def _size(value: Any) -> int:
    return length(value) if isinstance(value, str) else len(value)


def _refuse_large_integer(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise SecurityError(f"it computes a number of {bits:,} bits; {_MAX_INTEGER_BITS:,} is the most")
