"""``%krex_measure`` and ``%%krex_measure``: `measure`, reading its statement as ``%timeit`` does.

The line becomes a dataclass, the statement a function, the function a `Measurement`, and that is shown. What
people know from ``%timeit`` holds here: options come before the statement and the statement is taken as it is
written (quotes, ``$`` and braces too); a cell's first line is setup code, run once and untimed, in the statement's
own scope; names that are assigned stay inside; ``-o`` returns the result; ``-q`` shows nothing.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from IPython.core.error import UsageError

from .display import WaitingLine

if TYPE_CHECKING:
    from .runtime.results import Measurement
    from .runtime.timers import Cache

Shell: TypeAlias = Any
Magics: TypeAlias = Any

SHORT_OPTIONS = "d:p:t:l:oq"
LONG_OPTIONS = ("device=", "precision=", "max-time=", "timer=", "cache=", "label=")
_TIMERS = ("auto", "host", "events", "torch", "cupy", "numba")
_MAKER = "_krex_measure_make"
_STATEMENT = "_krex_measure_statement"


@dataclass(frozen=True)
class MeasureOptions:
    """What the line asks for, and the statement that follows."""

    statement: str
    device: str | None = None
    precision: float = 0.005
    max_time_s: float = 1.0
    timer: str = "auto"
    cache: Cache = "cold"
    label: str | None = None
    returns: bool = False
    quiet: bool = False


def parse_measure(given: Mapping[str, Any], statement: str, device: str | None) -> MeasureOptions:
    """The options as ``parse_options`` found them.

    Raises:
        UsageError: a value that cannot be meant; the message says what would be valid.
    """
    cache = str(given.get("cache", "cold"))
    if cache not in ("cold", "warm"):
        raise UsageError(f"%krex_measure: --cache {cache} is not valid: valid are cold, warm")
    timer = str(given.get("timer", "auto"))
    if timer not in _TIMERS:
        raise UsageError(f"%krex_measure: --timer {timer} is not valid: valid are {', '.join(_TIMERS)}")
    wanted = str(given.get("d", given.get("device", device or "")))
    if "," in wanted:
        raise UsageError(f"%krex_measure: one device is measured at a time, not {wanted}")
    return MeasureOptions(
        statement=statement,
        device=wanted or None,
        precision=_precision(str(given.get("p", given.get("precision", "0.005")))),
        max_time_s=_duration_s(str(given.get("t", given.get("max-time", "1")))),
        timer=timer,
        cache=cast("Cache", cache),
        label=str(given["l"]) if "l" in given else given.get("label"),
        returns="o" in given,
        quiet="q" in given,
    )


def measure_statement(shell: Shell, options: MeasureOptions, setup: str) -> Measurement | None:
    """Measure the statement and show the result; returns it where ``-o`` asks for it."""
    from .runtime.measure import measure

    function = compile_statement(shell, options.statement, setup)
    line = WaitingLine(shell, quiet=True)
    try:
        found = measure(
            function,
            device=options.device,
            precision=options.precision,
            max_time=options.max_time_s,
            cache=options.cache,
            timer=options.timer,
            label=_label(options),
            on_queued=line.queued,
        )
    finally:
        line.finish(None)
    if not options.quiet:
        shell.display_pub.publish(data=found._repr_mimebundle_())
    return found if options.returns else None


def compile_statement(shell: Shell, statement: str, setup: str) -> Callable[[], Any]:
    """The statement as a function, whose globals are the user's and whose scope is shared with the setup code.

    The setup code has run once when this returns.

    Raises:
        SyntaxError: as for any cell; the shell shows it under the statement.
    """
    setup_nodes = _parsed(shell, setup)
    nodes = _parsed(shell, statement)
    # As in %timeit, both are one scope; here they are two functions, because only one of them is timed.
    shared = sorted(_assigned(setup_nodes) & _assigned(nodes))
    body: list[ast.stmt] = [ast.Nonlocal(shared), *nodes] if shared else nodes
    inner = _function(_STATEMENT, body)
    outer = _function(_MAKER, [*setup_nodes, inner, ast.Return(ast.Name(_STATEMENT, ast.Load()))])
    module = ast.fix_missing_locations(ast.Module([outer], []))
    name = shell.compile.cache(shell.transform_cell(statement), shell.displayhook.prompt_count)
    scope: dict[str, Any] = {}
    exec(shell.compile(module, name, "exec"), shell.user_ns, scope)  # noqa: S102 (what a magic does)
    made: Callable[[], Any] = scope[_MAKER]()
    return made


def _parsed(shell: Shell, source: str) -> list[ast.stmt]:
    tree = shell.transform_ast(shell.compile.ast_parse(shell.transform_cell(source)))
    nodes: list[ast.stmt] = tree.body
    return nodes


def _function(name: str, body: list[ast.stmt]) -> ast.stmt:
    made = ast.parse(f"def {name}(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)  # noqa: S101 (what the line above parses to)
    made.body = body or [ast.Pass()]
    return made


def _assigned(nodes: list[ast.stmt]) -> set[str]:
    """Names that the statements bind in their own scope."""
    found: set[str] = set()
    pending: list[ast.AST] = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        pending.extend(ast.iter_child_nodes(node))
    return found


def _label(options: MeasureOptions) -> str:
    if options.label is not None:
        return options.label
    words = " ".join(options.statement.split())
    return words if len(words) <= 60 else words[:59] + "…"


def _precision(text: str) -> float:
    try:
        value = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1.0:
        raise UsageError(
            f"%krex_measure: {text!r} is no precision: valid is a fraction or percent, 0.005 or 0.5%"
        )
    return value


def _duration_s(text: str) -> float:
    try:
        value_s = float(text)
    except ValueError:
        value_s = math.nan
    if not 0.0 < value_s < math.inf:
        raise UsageError(f"%krex_measure: {text!r} is no time: valid are seconds above 0, such as 0.5")
    return value_s
