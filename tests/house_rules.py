"""The measurable part of the house style (CONTRIBUTING.md), as functions of one source file or of all.

Every rule takes a `Source` and yields complaints, `place: what is wrong, with the number -> the limit`.
tests/unit/test_house_rules.py runs them over the repository, and shows each one a violation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[["Source"], Iterator[str]]

MAX_FILE_LINES = 400
P90_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_INIT_LINES = 25
MAX_STEP_LINES = 40
MAX_ALGORITHM_LINES = 120
MAX_CONFIG_LINES = 40
MAX_ARGUMENTS = 6
MAX_POSITIONAL = 4
MAX_ABSTRACT = 7
MAX_DEPTH = 2
MAX_PUBLIC_CLASSES = 3

HOOKS = frozenset(
    {
        *("forward", "backward", "__call__", "__exit__", "__setstate__"),
        *("setup", "teardown", "step", "state_dict", "load_state_dict"),
        *("save_checkpoint", "load_checkpoint", "remove_checkpoint"),
        *("training_step", "validation_step", "predict_step", "write_on_epoch_end"),
        *("add_core_arguments_to_parser", "add_arguments_to_parser", "instantiate_trainer"),
    }
)
"""Signatures that another library calls, like everything named `on_...`: their arguments are not ours."""

DATA_CLASSES = frozenset({"Enum", "IntEnum", "StrEnum", "NamedTuple", "TypedDict", "Protocol"})


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the repository."""
    text: str
    """Its contents."""

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree: many rules look at each."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def num_lines(self) -> int:
        """Lines, blank ones and comments included."""
        return len(self.text.splitlines())

    def at(self, node: ast.stmt | ast.expr | ast.ExceptHandler, name: str = "") -> str:
        """Place of a node."""
        return f"{self.path}:{node.lineno}{': ' if name else ''}{name}"

    def functions(self) -> Iterator[tuple[Function, ast.ClassDef | None]]:
        """Yield every function with the class that it is a method of."""
        owners = {id(f): c for c in self.classes() for f in c.body if isinstance(f, Function)}
        for node in self.nodes:
            if isinstance(node, Function):
                yield node, owners.get(id(node))

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield every class."""
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


def _length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _name(node: ast.expr) -> str:
    """Last part of a dotted, called or subscripted name: `abc.Mapping[str, int]` is `Mapping`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    return {_name(decorator) for decorator in node.decorator_list}


def file_length(source: Source) -> Iterator[str]:
    """A file is read in one sitting."""
    limit = MAX_ALGORITHM_LINES if source.path.startswith("algos/") else MAX_FILE_LINES
    if source.num_lines > limit:
        yield f"{source.path}: {source.num_lines} lines -> {limit}"


def function_length(source: Source) -> Iterator[str]:
    """A function fits the screen; a constructor assigns, and an algorithm's `step` is a figure of a paper."""
    for function, owner in source.functions():
        limit = MAX_FUNCTION_LINES
        if owner is not None:
            limit = {"__init__": MAX_INIT_LINES, "step": MAX_STEP_LINES}.get(function.name, limit)
        if _length(function) > limit:
            yield f"{source.at(function, function.name)}: {_length(function)} lines -> {limit}"


def argument_count(source: Source) -> Iterator[str]:
    """Few arguments, none of them `**kwargs` that are only passed on."""
    for function, owner in source.functions():
        names = _arguments(function, owner)
        if len(names) > MAX_ARGUMENTS and not _is_hook(function, owner):
            yield f"{source.at(function, function.name)}: {len(names)} arguments -> {MAX_ARGUMENTS}"


def keyword_only(source: Source) -> Iterator[str]:
    """Options have names at the call: past the first argument, what has a default is keyword-only.

    Two exceptions: up to four arguments without a default may stand by position, as the tensors of a formula
    do, and one with a default may follow them, as `dim` does in torch.
    """
    for function, owner in source.functions():
        private = function.name.startswith("_") and not function.name.startswith("__")
        if private or _is_hook(function, owner):
            continue
        positional = [*function.args.posonlyargs, *function.args.args][_bound(function, owner) :]
        num_options = min(len(function.args.defaults), len(positional) - 1)
        if num_options > 1:
            names = ", ".join(argument.arg for argument in positional[-num_options:])
            yield f"{source.at(function, function.name)}: options by position: {names} -> keyword-only"
        elif len(positional) > MAX_POSITIONAL:
            yield f"{source.at(function, function.name)}: {len(positional)} by position -> {MAX_POSITIONAL}"


def _is_hook(function: Function, owner: ast.ClassDef | None) -> bool:
    known = function.name in HOOKS or function.name.startswith("on_") or "override" in _decorators(function)
    return owner is not None and known


def _bound(function: Function, owner: ast.ClassDef | None) -> int:
    return int(owner is not None and "staticmethod" not in _decorators(function))


def _arguments(function: Function, owner: ast.ClassDef | None) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args][_bound(function, owner) :]
    return [argument.arg for argument in (*arguments, *function.args.kwonlyargs)]


def abstract_members(source: Source) -> Iterator[str]:
    """A new kind of part writes few methods: the rest has defaults that work."""
    for owner in source.classes():
        methods = [node for node in owner.body if isinstance(node, Function)]
        abstract = [node for node in methods if {"abstractmethod", "abstractproperty"} & _decorators(node)]
        count = len(methods) if "Protocol" in {_name(base) for base in owner.bases} else len(abstract)
        if count > MAX_ABSTRACT:
            yield f"{source.at(owner, owner.name)}: {count} abstract members -> {MAX_ABSTRACT}"


def blind_except(source: Source) -> Iterator[str]:
    """Whoever catches everything raises again."""
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        blind = any(name is None or _name(name) in ("Exception", "BaseException") for name in caught)
        if blind and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
            yield f"{source.at(node)}: catches everything and does not raise"


def one_public_class(source: Source) -> Iterator[str]:
    """One noun, one file; up to three where they are nothing without each other.

    Data classes, enumerations, protocols, exceptions and subclasses of a class of the file are not counted.
    """
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes}
    public = [
        node.name for node in classes if not node.name.startswith("_") and not _is_companion(node, names)
    ]
    if len(public) > MAX_PUBLIC_CLASSES:
        yield f"{source.path}: public classes {', '.join(public)} -> {MAX_PUBLIC_CLASSES}"


def _is_companion(node: ast.ClassDef, family: set[str]) -> bool:
    bases = {_name(base) for base in node.bases}
    is_error = node.name.endswith(("Error", "Exception"))
    return "dataclass" in _decorators(node) or is_error or bool(bases & (DATA_CLASSES | family))


def inheritance(sources: Sequence[Source]) -> Iterator[str]:
    """Share by functions and composition: at most two steps below a base of ours."""
    places = {node.name: source.at(node, node.name) for source in sources for node in source.classes()}
    bases = {
        node.name: [_name(base) for base in node.bases] for source in sources for node in source.classes()
    }

    def depth(name: str) -> int:
        return max((depth(base) + 1 for base in bases[name] if base in bases and base != name), default=0)

    for name in bases:
        if depth(name) > MAX_DEPTH:
            yield f"{places[name]}: {depth(name)} classes of ours above it -> {MAX_DEPTH}"


def file_length_p90(sources: Sequence[Source]) -> Iterator[str]:
    """Nine files of ten are short."""
    lengths = sorted(source.num_lines for source in sources)
    p90 = lengths[(9 * len(lengths) - 1) // 10] if lengths else 0
    if p90 > P90_FILE_LINES:
        yield f"90% of the files have at most {p90} lines -> {P90_FILE_LINES}"


def names_no_choice(source: Source, *, classes: frozenset[str], short: frozenset[str]) -> Iterator[str]:
    """The core names no algorithm and no strategy: not the class, not the short name."""
    for node in source.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if name in classes or text in short:
            yield f"{source.path}:{getattr(node, 'lineno', 0)}: names {name or text} -> the registry knows it"


def config_file(path: str, text: str) -> Iterator[str]:
    """A config shows differences only, and begins with the command that runs it."""
    lines = text.splitlines()
    if len(lines) > MAX_CONFIG_LINES:
        yield f"{path}: {len(lines)} lines -> {MAX_CONFIG_LINES}"
    if not (
        lines and re.match(rf"# rlhf (fit|validate|predict|export|map)\b.* {re.escape(path)}\b", lines[0])
    ):
        yield f"{path}: the first line -> # rlhf fit -c {path}"


# Spelt in pieces: this file is read as well.
_MACHINE = re.compile(
    "(?<![\\w.$}~/-])/(?:" + "|".join(("home", "root", "work", "farm", "opt/wheels", "opt/pypi")) + ")/"
    "|\\b(?:work"
    "place|co-authored"
    "-by|generated"
    " with)\\b",
    re.IGNORECASE,
)


def no_machine(path: str, text: str) -> Iterator[str]:
    """Nothing in the repository tells on whose machine, or with which tools, it was written."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := _MACHINE.search(line):
            yield f"{path}:{number}: {found.group()!r} -> no path of one machine, no word of its tools"


PRODUCT: tuple[Rule, ...] = (
    file_length,
    function_length,
    argument_count,
    keyword_only,
    abstract_members,
    blind_except,
    one_public_class,
)
"""Rules for rlhf_lightning/, algos/ and strategies/."""

OTHERS: tuple[Rule, ...] = (file_length, function_length, blind_except)
"""Rules for tests, examples and benchmarks."""
