"""Jinja's sandbox for prompts: only data can be looked up, only known methods called, and every row has a bound on its
work. `template_tree` rewrites a template so that all that it does passes through here.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import StrictUndefined, Undefined, pass_context
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from batch_assets.templates.filters import format_method, formatted, install, joined, replaced
from batch_assets.templates.values import (
    MAX_BITS,
    MOMENTS,
    Meter,
    Nothing,
    TooMuch,
    Unprintable,
    fits,
    is_data,
    kind_of,
    text_of,
    words,
)

BUILTIN = "_jinja_"  # what globals are called inside, so that columns can have their names
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_OF_JINJA = (LoopContext, Cycler, Joiner, Namespace)
_MACRO_STEPS = 4
_NUMBERS = frozenset({int, float, bool})
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_METHODS: dict[type, frozenset[str]] = {
    str: _PADDING
    | words(
        "capitalize casefold count endswith expandtabs find format index isalnum isalpha isascii isdecimal isdigit "
        "isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix "
        "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title "
        "upper"
    ),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"get", "items", "keys", "values"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}
_MOMENT_METHODS = words("date time isoformat isocalendar isoweekday weekday strftime timestamp toordinal total_seconds")
_MOMENT_FIELDS = words("year month day hour minute second microsecond tzinfo days seconds microseconds hex")
_LONG_FIELD = re.compile(r"%[^a-zA-Z%]*\d{3}")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. Not for two threads: its meter counts the work of one row."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        self.meter = Meter()
        # Without the optimizer, which would work out `'a' | center(2e9)` while it compiles.
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False, optimized=False)
        install(self, self.meter)
        self.builtins = {f"{BUILTIN}{name}": self.globals[name] for name in _GLOBALS}
        self.builtins[f"{BUILTIN}range"] = bounded_range
        self.globals = {}  # a template finds them among its variables, under names that no column can have
        self.filters |= {
            "attr": self._attribute,
            COUNTED: self._counted,
            BUILT: self._built,
            SIZED: self._sized,
            ITEM: self._item,
            METHOD: self._method,
            JOINED: self._joined,
            PRINTED: printed,
            SPENT: self.meter.spend,
        }

    def concat(self, parts: Iterable[str]) -> str:  # how Jinja joins what it rendered
        """Output of a template, a macro or a block, bounded."""
        texts = parts if isinstance(parts, list) else list(parts)
        length = sum(map(len, texts))
        fits(length)
        self.meter.spend(length // 128)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`."""
        if operator == "+" and type(left) in _NUMBERS and type(right) in _NUMBERS:
            return left + right
        if operator == "%" and isinstance(left, str):
            self.meter.weigh(right)
            found = formatted(left, **right) if isinstance(right, dict) else formatted(left, *_words(right))
        else:
            _BOUNDS[operator](left, right)
            found = super().call_binop(context, operator, left, right)
        self.meter.weigh(found)
        return found

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Macros, loops, the functions of Jinja, and methods of data."""
        meter = __self.meter
        meter.spend(1)
        for one in args:
            if is_data(one):
                meter.weigh(one)
        for word, one in kwargs.items():
            if is_data(one) and word not in ("_loop_vars", "_block_vars"):
                meter.weigh(one)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, types.BuiltinMethodType) and owner is not None:
            __obj = _bounded_method(__obj, owner, args)
        elif isinstance(__obj, LoopContext):
            args = (__self._counted(args[0], 8), *args[1:]) if args else args
        elif isinstance(__obj, Macro):
            meter.spend(_MACRO_STEPS)
        elif not (__obj in _FUNCTIONS or isinstance(owner, _OF_JINJA) or owner_of(__obj)):
            raise Unprintable(f"expected a macro, a function or a method to call, found {kind_of(__obj)}")
        found = super().call(__context, __obj, *args, **kwargs)
        if is_data(found):
            meter.weigh(found)
        return found

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Items and fields of data; never a method."""
        if isinstance(obj, _OF_JINJA):
            return super().getattr(obj, argument) if isinstance(argument, str) else self.undefined(obj=obj)
        if isinstance(obj, Undefined):
            return obj[argument]
        if isinstance(obj, MOMENTS):
            found = getattr(obj, argument, None) if argument in _MOMENT_FIELDS else None
            return self.undefined(obj=obj, name=argument) if found is None or callable(found) else found
        if not isinstance(obj, dict | list | tuple | str):
            return self.undefined(obj=obj, name=argument)
        try:
            return obj[argument]
        except (LookupError, TypeError):
            return self.undefined(obj=obj, name=argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As `getitem`: a column wins over a method of its name."""
        return self.getitem(obj, attribute)

    def _attribute(self, value: Any, name: str) -> Any:
        return self.getitem(value, name)

    def _counted(self, values: Any, steps: int) -> Any:
        """What a loop runs over, paid for before it begins."""
        if isinstance(values, Undefined):
            return values
        if not isinstance(values, list | tuple | dict | str | range):
            values = self.filters["list"](values)
        self.meter.spend(len(values) * steps)
        return values

    def _built(self, value: Any) -> Any:
        """A list, mapping or slice that the template makes."""
        self.meter.weigh(value)
        return value

    def _sized(self, value: Any) -> Any:
        """A side of a comparison."""
        if type(value) is not int and is_data(value):
            self.meter.weigh(value)
        return value

    def _joined(self, values: list[Any]) -> str:
        self.meter.spend(len(values))
        return joined("", values)

    def _item(self, value: Any, key: Any, path: str) -> Any:
        found = self.getitem(value, key)
        if type(found) is StrictUndefined and not isinstance(value, Undefined):
            hint = f"{path}: expected a field {key!r}, found none in {kind_of(value)}"
            return self.undefined(hint, obj=value, name=key)
        return found

    def _method(self, value: Any, name: str, path: str) -> Any:
        """What `value.name(…)` calls."""
        if isinstance(value, dict) and name in value:
            if name in _METHODS[dict]:
                hint = f"{path}: a field of this name hides the method; write `| {name}` or `| list`"
                raise Unprintable(hint)
            return value[name]
        if isinstance(value, (*_OF_JINJA, Undefined)):
            return super().getattr(value, name)
        allowed = _MOMENT_METHODS if isinstance(value, MOMENTS) else _METHODS.get(type(value), frozenset())
        if name not in allowed:
            raise Unprintable(f"{path}: expected a method for {kind_of(value)} such as those of docs/datasets.md")
        return getattr(value, name)


def bounded_range(*given: int) -> range:
    """`range` of at most as many numbers as Jinja's sandbox allows."""
    found = range(*given)
    if not -(1 << 62) < found.start < 1 << 62 or not -(1 << 62) < found.stop < 1 << 62 or len(found) > MAX_RANGE:
        raise TooMuch(f"makes a range of more than {MAX_RANGE:,} numbers")
    return found


# Names of filters that only the rewritten template uses; with a blank, so that nobody can write them.
COUNTED, BUILT, SIZED = "counted loop", "built value", "sized value"
ITEM, METHOD, JOINED, PRINTED, SPENT = "item of", "method of", "joined text", "printed text", "spent steps"
_FUNCTIONS: tuple[Any, ...] = (bounded_range, dict, Namespace, Cycler, Joiner)


@pass_context  # Jinja works out no filter that wants a context before there is one
def printed(_: Context, value: Any, path: str, required: bool = False) -> str:
    """The text of an expression; `path`: what it is about, for the error; `required`: refuse empty text."""
    kind = type(value)
    if kind is str:
        if required and not value.strip():
            raise Nothing(f"{path} is empty")
        return value  # type: ignore[no-any-return]
    if required and value is None:
        raise Nothing(f"{path} is null")
    try:
        return text_of(value)
    except Unprintable as error:
        raise Unprintable(f"{path}: {error}" if path else str(error)) from None


def owner_of(function: Any) -> bool:
    """Whether it is a method of a date, a time or a decimal, or an instance of a Jinja class that can be called."""
    return isinstance(function, Joiner) or isinstance(getattr(function, "__self__", None), MOMENTS)


def _bounded_method(method: Any, owner: Any, given: tuple[Any, ...]) -> Callable[..., Any]:
    """The method, or one of ours that does the same within bounds."""
    name: str = method.__name__
    if isinstance(owner, MOMENTS) or (isinstance(owner, type) and issubclass(owner, MOMENTS)):
        if name == "strftime" and given and (len(str(given[0])) > 1000 or _LONG_FIELD.search(str(given[0]))):
            raise Unprintable("strftime: expected a format without widths")
        return method  # type: ignore[no-any-return]
    if name not in _METHODS.get(type(owner), ()):
        raise Unprintable(f"expected a macro, a function or a method to call, found {kind_of(method)}")
    if type(owner) is not str:
        return method  # type: ignore[no-any-return]
    if name in _PADDING and given:
        fits(given[0])
    if name == "expandtabs":
        fits(len(owner) + owner.count("\t") * (given[0] if given else 8))
    bounded: dict[str, Callable[..., Any]] = {"join": joined, "replace": replaced, "format": format_method}
    if name in bounded:
        work = bounded[name]
        return lambda *rest, **options: work(owner, *rest, **options)
    return method  # type: ignore[no-any-return]


def _sum_fits(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        fits(len(left) + len(right))


def _product_fits(left: Any, right: Any) -> None:
    for values, times in ((left, right), (right, left)):
        if isinstance(values, str | list | tuple) and isinstance(times, int):
            fits(len(values) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise TooMuch(f"makes a whole number of more than {MAX_BITS} bits")


def _power_fits(left: Any, right: Any) -> None:
    if abs(left) > 1 << 16 or abs(right) > 64:
        raise TooMuch("makes a power that is too large")


def _words(right: Any) -> tuple[Any, ...]:
    return right if isinstance(right, tuple) else (right,)


_BOUNDS: dict[str, Callable[[Any, Any], None]] = {
    "+": _sum_fits,
    "*": _product_fits,
    "**": _power_fits,
    "%": lambda left, right: None,
}
