"""A Jinja environment for chat templates, which are code out of files nobody vouches for.

jinja2's own sandbox bounds neither time nor memory. Three bounds are added:
- time: while a template renders, a trace function of this thread looks at the clock at every line of Python
  (sys.settrace; one that was set before is put back). Loops, recursion and straight code all meet it; only
  single operations in C do not, and these are kept short by the other two.
- size: everything that makes a longer string, list or number out of others (`*`, `**`, `+`, `%`, `~`,
  formats, replace, join, split, padding, indentation, slices, captured blocks, literals) is charged
  beforehand to an account of bytes (template_limits).
- reach: only the methods and filters that cannot multiply text, or are charged here, exist.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from infer.runtime.tokenizer import template_limits as limits
from infer.runtime.tokenizer.template_limits import TemplateLimitError, meter

UNTRACED = frozenset({__file__, limits.__file__})

_MISSING_FILTERS = ("batch", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_TEXT_FILTERS = {
    **dict.fromkeys(
        ("capitalize", "lower", "safe", "string", "title", "trim", "truncate", "upper", "wordcount"), 1
    ),
    **dict.fromkeys(("e", "escape", "forceescape"), 6),
    "urlencode": 12,
}
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        [
            "capitalize",
            "casefold",
            "center",
            "count",
            "endswith",
            "find",
            "format",
            "format_map",
            "index",
            "isalnum",
            "isalpha",
            "isascii",
            "isdecimal",
            "isdigit",
            "islower",
            "isnumeric",
            "isspace",
            "istitle",
            "isupper",
            "join",
            "ljust",
            "lower",
            "lstrip",
            "partition",
            "removeprefix",
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rjust",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "swapcase",
            "title",
            "upper",
            "zfill",
        ]
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
}


def create_environment() -> jinja2.Environment:
    """The environment of Hugging Face's chat templates, bounded. Render inside `template_limits.metered`."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # folding constants would run them before anything is metered
        finalize=_finalize,
        extensions=[LoopControlExtension, _GenerationTag],
    )
    for name in _MISSING_FILTERS:
        del environment.filters[name]
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _bounded(name, function)
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _Generator(CodeGenerator):
    """Sends what jinja2 compiles to plain Python, past the sandbox, through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._wrap("join_texts", "(", node.nodes, ",)", frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._wrap("keep", "[", node.items, "]", frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load" or not node.items:
            super().visit_Tuple(node, frame)
        else:
            self._wrap("keep", "(", node.items, ",)", frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.keep(")
        super().visit_Dict(node, frame)
        self.write(")")

    def _wrap(self, method: str, left: str, items: Iterable[nodes.Node], right: str, frame: Frame) -> None:
        self.write(f"environment.{method}({left}")
        for position, item in enumerate(items):
            if position:
                self.write(", ")
            self.visit(item, frame)
        self.write(f"{right})")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits.charge_binary(meter(), operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return meter().kept(result) if isinstance(result, list | tuple) else result

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, slice) and isinstance(obj, str | list | tuple):
            meter().charge(limits.text_bytes(obj) if isinstance(obj, str) else limits.SMALL + 8 * len(obj))
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            # Compiled calls carry the scope along, which the context takes out again.
            own = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            _charge_method(__obj.__self__, __obj.__name__, args, own)
        return meter().kept(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            limits.charge_brace_format(meter(), value.__self__, [*args, *kwargs.values()])
            return formatted(*args, **kwargs)

        return bounded

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a template, a macro or a captured block has put out."""
        return meter().join_charged(parts)

    def join_texts(self, values: tuple[Any, ...]) -> str:
        account = meter()
        for value in values:
            account.charge_as_text(value)
        return "".join(map(str, values))

    def keep(self, value: Any) -> Any:
        return meter().kept(value)


class _Namespace(Namespace):
    """A namespace can hold itself: printing its contents might not end."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's words for training; it does nothing here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Called with every value to put out; taking the context keeps jinja2 from calling it at compile time."""
    if not isinstance(value, str):
        meter().charge_as_text(value)
    return value


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _charge_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    account = meter()
    if name == "replace":
        limits.charge_replace(account, text, *args, **kwargs)
    elif name == "join" and args:
        items = args[0]
        if not isinstance(items, list | tuple | dict | str):
            raise TemplateLimitError("it joins what is not a list")
        limits.charge_join(account, text, list(items))
    elif name in ("split", "rsplit"):
        limits.charge_split(account, text, *args, **kwargs)
    elif name == "splitlines":
        limits.charge_split(account, text, " ")
        account.charge(
            limits.SMALL * sum(text.count(mark) for mark in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
        )
    elif name in ("center", "ljust", "rjust", "zfill") and args:
        limits.width(args[0])
    account.charge(limits.text_bytes(text))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that charges for what it makes: text beforehand, lists once they are there."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, environment or evaluation context
    before = _BEFORE.get(name)
    factor = _TEXT_FILTERS.get(name)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        account = meter()
        if factor is not None and len(args) > skip:
            account.charge_as_text(args[skip], factor)
        if before is not None:
            own = list(args[skip:])
            before(own, kwargs)
            args = (*args[:skip], *own)
        return account.kept(function(*args, **kwargs))

    return run


def _argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _before_join(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0] = list(args[0])
    limits.charge_join(meter(), _argument(args, kwargs, 1, "d", ""), args[0])


def _before_replace(args: list[Any], kwargs: dict[str, Any]) -> None:
    limits.charge_replace(meter(), *args, **kwargs)


def _before_center(args: list[Any], kwargs: dict[str, Any]) -> None:
    limits.width(_argument(args, kwargs, 1, "width", 80))


def _before_indent(args: list[Any], kwargs: dict[str, Any]) -> None:
    width = limits.width(_argument(args, kwargs, 1, "width", 4))
    meter().charge_as_text(args[0], 1 + width)


def _before_format(args: list[Any], kwargs: dict[str, Any]) -> None:
    limits.charge_binary(meter(), "%", str(args[0]), kwargs or tuple(args[1:]))


def _before_round(args: list[Any], kwargs: dict[str, Any]) -> None:
    limits.width(abs(_argument(args, kwargs, 1, "precision", 0)))


def _before_int(args: list[Any], kwargs: dict[str, Any]) -> None:
    if isinstance(args[0], str):
        limits.width(args[0])


_BEFORE: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    "join": _before_join,
    "replace": _before_replace,
    "center": _before_center,
    "indent": _before_indent,
    "format": _before_format,
    "round": _before_round,
    "int": _before_int,
}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes, with the options Hugging Face's filter has."""
    account = meter()
    limits.width(indent)
    padding = sum(map(limits.width, separators)) if separators else 2
    account.charge(6 * account.tree_bytes(value) * (1 + padding // limits.SMALL))
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )
    if indent is None:
        text = encoder.encode(value)
    else:
        text = account.join_charged(encoder.iterencode(value))
    if ensure_ascii and account.mark:
        # The mark is taken out of what the template puts out, so it must stay what it is.
        text = text.replace(json.dumps(account.mark)[1:-1], account.mark)
    return text
