"""``%%krex_exclusive``, ``%krex`` and ``%krex_measure``: exclusive regions from a notebook cell.

A magic is a pipeline: its line becomes a dataclass (`parse_exclusive`), its cell becomes code
(`compile_cell`), the code runs inside a region, the region leaves a report, the report is displayed. All that
can be done before the region is entered is done before: a region's held time is what others wait for. For the
same reason the last expression is *evaluated* inside and *displayed* after the end.

How a cell runs
---------------
It must behave as the cell would without its first line. So it is transformed, parsed and compiled by the
shell, registered in the shell's compiler cache (which makes `inspect.getsource`, ``@triton.jit`` and
tracebacks find its source) and executed in the user's namespace. The magic's own line stays line 1 of that
source, so a traceback names the line that the editor shows.

``shell.run_cell`` is not used: it would print errors itself, and again when the magic re-raises them.

Cells with a top-level ``await``
--------------------------------
A cell magic is a plain call, ``get_ipython().run_cell_magic(...)``. Under ipykernel the event loop is running
already when it is made, so the call cannot wait for a coroutine: ``run_until_complete`` refuses, and a second
loop in a thread would run the user's code away from the loop that its clients, locks and tasks belong to.
Patching the loop to be re-entrant changes it for everybody. Returning a coroutine only displays it.

What works is to let the kernel know beforehand. ipykernel decides by the *transformed* cell whether to run it
as a task of its loop. So one post-transformer looks at cells that are a ``%%krex_exclusive``, and only where
the body itself has a top-level ``await`` turns the call into an awaited one. Such a body is a coroutine with
or without the magic, and is interrupted (by cancellation) as such. All others stay plain calls: made
asynchronous, a body that blocks could not be interrupted any more.

What still fails: a cell magic *around* this one (``%%time``) that compiles its body itself. Where nothing can
await the body, a `UsageError` says so before anything is asked for.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import keyword
import math
import os
import re
import shlex
import signal
import socket
import sys
import threading
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast, get_args

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand
from traitlets import Bool, Enum, Float, Unicode

from .display import DevicesView, HistoryView, StatusView, WaitingLine
from .errors import KrexError
from .protocol import CpuPolicy, Foreign

if TYPE_CHECKING:
    from .runtime.region import Exclusive, Region

Shell: TypeAlias = Any
"""An IPython ``InteractiveShell``, which is typed in part only, and not alike from version to version."""

_CPU_POLICIES: tuple[str, ...] = get_args(CpuPolicy)
_FOREIGN: tuple[str, ...] = get_args(Foreign)


def load(shell: Shell) -> None:
    """Register the magics; this process joins the coordinator in the background."""
    if KrexMagics.__name__ in shell.magics_manager.registry:
        return
    magics = KrexMagics(shell)
    magics.joining = _Joining(shell)
    shell.register_magics(magics)
    shell.input_transformers_post.append(magics.await_the_awaiting)
    magics.joining.start()


def unload(shell: Shell) -> None:
    """Take the magics away; this process leaves the coordinator."""
    manager = shell.magics_manager
    magics = manager.registry.pop(KrexMagics.__name__, None)
    if magics is None:
        return
    for kind, names in magics.magics.items():
        for name in names:
            manager.magics[kind].pop(name, None)
    if magics in shell.configurables:
        shell.configurables.remove(magics)
    if magics.await_the_awaiting in shell.input_transformers_post:
        shell.input_transformers_post.remove(magics.await_the_awaiting)
    magics.joining.undo()


# --- Options ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExclusiveOptions:
    """What the line of ``%%krex_exclusive`` asks for. None is the runtime's own default."""

    device: str | tuple[str, ...] | None = None
    timeout_s: float | None = None
    max_hold_s: float | None = None
    cpu: CpuPolicy = "auto"
    foreign: Foreign = "observe"
    label: str | None = None
    out: str | None = None
    quiet: bool = False
    strict: bool = False


def parse_exclusive(line: str, defaults: ExclusiveOptions) -> ExclusiveOptions:
    """The options in ``line``, over ``defaults``.

    Raises:
        UsageError: an unknown option, a bad value; the message says what would be valid.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%krex_exclusive: {error} in: {line}") from None
    given = vars(_exclusive_parser().parse_args(words))
    options = ExclusiveOptions(**{**vars(defaults), **given})
    if options.max_hold_s == 0 and options.cpu != "share":
        raise UsageError(
            "%%krex_exclusive: --max-hold 0 (no limit) needs --cpu share; else give seconds above 0"
        )
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage().strip()}")


def _exclusive_parser() -> _Parser:
    # An option that is not given leaves no attribute, so that the configured default shows through.
    parser = _Parser(
        prog="%%krex_exclusive", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("-d", "--device", type=_device, metavar="DEVICE")
    parser.add_argument("-t", "--timeout", dest="timeout_s", type=_duration_s, metavar="TIMEOUT")
    parser.add_argument("--max-hold", dest="max_hold_s", type=_duration_s, metavar="S")
    parser.add_argument("--cpu", choices=_CPU_POLICIES)
    parser.add_argument("--foreign", choices=_FOREIGN)
    parser.add_argument("-l", "--label", metavar="LABEL")
    parser.add_argument("--out", type=_name, metavar="NAME")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--strict", action="store_true")
    return parser


def _device(text: str) -> str | tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no device: valid are cuda:0, cpu, a UUID, or cuda:0,cuda:1"
        )
    return names[0] if len(names) == 1 else names


def _duration_s(text: str) -> float:
    try:
        value_s = float(text)
    except ValueError:
        value_s = math.nan
    if not math.isfinite(value_s) or value_s < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration: valid are seconds, 0 or more, such as 2.5"
        )
    return value_s


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no variable: valid is a Python name, such as report")
    return text


# --- The cell -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompiledCell:
    """A cell, ready to run: all but the last expression, and the last expression where it is displayed."""

    body: tuple[CodeType, ...]
    last: CodeType | None

    @property
    def parts(self) -> tuple[CodeType, ...]:
        """All of it, in order."""
        return self.body if self.last is None else (*self.body, self.last)

    @property
    def awaits(self) -> bool:
        """Whether it has a top-level ``await``."""
        return any(code.co_flags & inspect.CO_COROUTINE for code in self.parts)

    def run(self, shell: Shell) -> Any:
        """Execute it in the user's namespace; the last expression's value, or None."""
        __tracebackhide__ = True
        for code in self.body:
            exec(code, shell.user_global_ns, shell.user_ns)  # noqa: S102
        return None if self.last is None else eval(self.last, shell.user_global_ns, shell.user_ns)  # noqa: S307

    async def run_async(self, shell: Shell) -> Any:
        """The same for a cell that awaits; its plain parts run as they are."""
        __tracebackhide__ = True
        value = None
        for code in self.parts:
            value = eval(code, shell.user_global_ns, shell.user_ns)  # noqa: S307
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
        return None if self.last is None else value


def compile_cell(shell: Shell, line: str, cell: str) -> CompiledCell:
    """``cell`` as the shell would compile it.

    Raises:
        SyntaxError: as for any cell.
    """
    source = cell_source(shell, line, cell)
    name = shell.compile.cache(source, shell.displayhook.prompt_count, raw_code=source)
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
    silent = _ends_with_semicolon(source)
    with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0):
        return _compiled(shell, tree.body, name, "none" if silent else shell.ast_node_interactivity)


def cell_source(shell: Shell, line: str, cell: str) -> str:
    """``cell`` as Python, below the magic's line as a comment: lines keep the numbers the editor shows."""
    # The transformation drops blank lines at the top.
    blank = len(cell) - len(cell.lstrip("\n"))
    transformed: str = shell.transform_cell(cell)
    return f"# %%krex_exclusive {line}".rstrip() + "\n" * (1 + blank) + transformed


def _compiled(shell: Shell, nodes: list[ast.stmt], name: str, interactivity: str) -> CompiledCell:
    nodes = list(nodes)
    if interactivity == "last_expr_or_assign":
        nodes.extend(_assigned_name(nodes[-1:]))
    last = nodes.pop() if interactivity != "none" and nodes and isinstance(nodes[-1], ast.Expr) else None
    if interactivity == "all":
        # Every statement shows its value, as it goes; only the last one can be shown after the region.
        body = tuple(_code(shell, ast.Interactive([node]), name, "single") for node in nodes)
    else:
        body = (_code(shell, ast.Module(nodes, []), name, "exec"),) if nodes else ()
    if not isinstance(last, ast.Expr):
        return CompiledCell(body, None)
    return CompiledCell(body, _code(shell, ast.Expression(last.value), name, "eval"))


def _code(shell: Shell, node: ast.mod, name: str, mode: str) -> CodeType:
    code: CodeType = shell.compile(node, name, mode)
    return code


def _ends_with_semicolon(source: str) -> bool:
    """Whether the last token is ``;``, as the shell's own display hook asks of a whole cell."""
    unwanted = {tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = [token.exact_type for token in tokens if token.type not in unwanted]
    return kinds[-1:] == [tokenize.SEMI]


def _assigned_name(nodes: Sequence[ast.stmt]) -> list[ast.stmt]:
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and len(targets) == 1:
            target = targets[0]
            if isinstance(target, ast.Name):
                shown = ast.Expr(ast.Name(target.id, ast.Load()))
                return [ast.fix_missing_locations(ast.copy_location(shown, node))]
    return []


# --- The magics ---------------------------------------------------------------------------------------------


@magics_class
class KrexMagics(Magics):
    """Exclusive regions for notebook cells. Options on the magic's line override these defaults."""

    device = Unicode(
        "",
        help="Device of a region: cuda:N, hip:N, cpu or a UUID. "
        "Empty: KREX_DEVICE, else the first GPU, else cpu.",
    ).tag(config=True)
    timeout_s = Float(
        None,
        allow_none=True,
        help="Longest wait for a turn, in seconds. 0: do not wait. None: the coordinator's (600 s).",
    ).tag(config=True)
    max_hold_s = Float(
        None,
        allow_none=True,
        help="Seconds after which the others go on and the verdict is revoked. "
        "None: the coordinator's (30 s). 0: no limit, only with cpu=share.",
    ).tag(config=True)
    cpu = Enum(
        _CPU_POLICIES,
        "auto",
        help="What others may do on the CPU meanwhile: freeze (nothing), isolate (all off the measuring "
        "cores), share (all), auto (isolate with at least 8 usable cores, else freeze).",
    ).tag(config=True)
    foreign = Enum(
        _FOREIGN,
        "observe",
        help="Processes that never joined: observe them, or gate them where that is allowed.",
    ).tag(config=True)
    quiet = Bool(False, help="No badge under the cell.").tag(config=True)
    strict = Bool(False, help="Raise at the region's end when the verdict is not clean.").tag(config=True)

    joining: _Joining
    """Set by `load`."""

    @cell_magic
    def krex_exclusive(self, line: str, cell: str) -> Any:
        """Run the cell while nothing else runs on the device.

        ::

            %%krex_exclusive [-d DEVICE] [-t TIMEOUT] [--max-hold S] [--cpu POLICY] [--foreign gate]
                             [-l LABEL] [--out NAME] [-q] [--strict]

        -d DEVICE       cuda:0, hip:1, cpu, a UUID; several with commas: all or none
        -t TIMEOUT      longest wait for a turn, in seconds
        --max-hold S    after S seconds the others go on, and the verdict is "revoked"
        --cpu POLICY    auto, freeze, isolate, share
        --foreign gate  also gate processes that never joined, where that is allowed
        -l LABEL        what others see while they wait; kept in the history
        --out NAME      bind the region's report to NAME
        -q              no badge
        --strict        raise at the end when the verdict is not "clean"

        Defaults: ``%config KrexMagics``. Prepare (compile, allocate) in an earlier cell: others wait for
        this one.
        """
        __tracebackhide__ = True
        run = self._prepare(line, cell)
        if not run.compiled.awaits:
            return run.run()
        # Only reached where the post-transformer did not see the cell: called directly, or by another magic.
        if _loop_runs():
            raise UsageError(
                "%%krex_exclusive: this cell awaits, and nothing can await it from here. "
                "Make %%krex_exclusive the first line of the cell, or use: async with krex.exclusive()"
            )
        return self._shell.loop_runner(run.run_async())

    async def exclusive_async(self, line: str, cell: str) -> Any:
        """``%%krex_exclusive`` for a cell that awaits; `await_the_awaiting` makes the shell call it."""
        __tracebackhide__ = True
        return await self._prepare(self._shell.var_expand(line, 1), cell).run_async()

    def await_the_awaiting(self, lines: list[str]) -> list[str]:
        """Input post-transformer: a ``%%krex_exclusive`` whose body awaits becomes an awaited call.

        Every other cell passes through at the cost of one comparison. A body with a syntax error takes the
        call's place: the shell reports it better than a magic can, and runs nothing.
        """
        if not lines or not lines[0].startswith("get_ipython().run_cell_magic('krex_exclusive'"):
            return lines
        try:
            call = ast.parse("".join(lines), mode="eval").body
            _, line, cell = (argument.value for argument in call.args)  # type: ignore[attr-defined]
        except (SyntaxError, AttributeError, ValueError):
            # Typed by hand and not the plain call of a cell magic: it is run as it is.
            return lines
        source = cell_source(self._shell, line, cell)
        try:
            self._shell.compile.ast_parse(source)
        except SyntaxError:
            return source.splitlines(keepends=True)
        if not self._shell.should_run_async(cell, transformed_cell=source):
            return lines
        manager = "get_ipython().magics_manager.registry['KrexMagics']"
        return [f"await {manager}.exclusive_async({line!r}, {cell!r})\n"]

    @no_var_expand
    @line_cell_magic
    def krex_measure(self, line: str, cell: str | None = None) -> Any:
        """Measure a statement in an exclusive region; reads as ``%timeit`` does.

        ::

            %krex_measure [options] STATEMENT
            %%krex_measure [options] [SETUP CODE, run once and untimed]
            CODE

        -d DEVICE, --device       cuda:0, hip:1, cpu or a UUID
        -p P, --precision         wanted half-width of the median's 99% interval: 0.005 or 0.5% (the default)
        -t S, --max-time          at most so many seconds in the region (1)
        --cache cold|warm         overwrite the GPU's L2 before each call (cold), or not
        --timer T                 auto, host, events, torch, cupy, numba
        -l LABEL, --label         what others see while they wait; kept in the history
        -o                        return the `Measurement`
        -q                        show nothing
        """
        __tracebackhide__ = True
        from .measure_magics import LONG_OPTIONS, SHORT_OPTIONS, measure_statement, parse_measure

        given, rest = self.parse_options(
            line, SHORT_OPTIONS, *LONG_OPTIONS, posix=False, strict=False, preserve_non_opts=True
        )
        statement = rest if cell is None else cell
        if not statement.strip():
            raise UsageError("%krex_measure: there is nothing to measure. Example: %krex_measure f(x)")
        options = parse_measure(given, statement, self.device or None)
        return measure_statement(self._shell, options, "" if cell is None else rest)

    @line_magic
    def krex(self, line: str) -> Any:
        """Show who measures, and what came of it.

        ::

            %krex [status]      who holds and who waits, per device; the last verdicts
            %krex devices       the devices of this host, and how each can be gated
            %krex history [N]   the last N reports (20)
            %krex monitor       a widget that follows the queue
        """
        __tracebackhide__ = True
        what, *arguments = line.split() or ["status"]
        if what not in ("status", "devices", "history", "monitor") or len(arguments) > (what == "history"):
            valid = "status, devices, history [N], monitor"
            raise UsageError(f"%krex: {line.strip()!r} is not valid: valid are {valid}")
        count = _count(*arguments)
        if what == "monitor":
            from .widgets import Monitor

            return Monitor()
        from .runtime import queries

        if what == "history":
            return HistoryView(queries.history(limit=count))
        return DevicesView(queries.devices()) if what == "devices" else StatusView(queries.status())

    def _prepare(self, line: str, cell: str) -> _Run:
        options = parse_exclusive(line, self._defaults())
        return _Run(self._shell, options, compile_cell(self._shell, line, cell))

    @property
    def _shell(self) -> Shell:
        return self.shell

    def _defaults(self) -> ExclusiveOptions:
        return ExclusiveOptions(
            device=_device(self.device) if self.device else None,
            timeout_s=self.timeout_s,
            max_hold_s=self.max_hold_s,
            cpu=cast("CpuPolicy", self.cpu),
            foreign=cast("Foreign", self.foreign),
            quiet=self.quiet,
            strict=self.strict,
        )


class _Run:
    """One cell in one region: enter, run, leave, show."""

    def __init__(self, shell: Shell, options: ExclusiveOptions, compiled: CompiledCell) -> None:
        self.compiled = compiled
        self._shell = shell
        self._options = options
        self._line = WaitingLine(shell, quiet=options.quiet)
        self._region: Region | None = None
        self._value: Any = None
        self._ran = False

    def run(self) -> Any:
        __tracebackhide__ = True
        entry = self._entry()
        try:
            with entry as self._region:
                self._line.granted()
                self._value = self.compiled.run(self._shell)
                self._ran = True
        finally:
            self._finish()
        return self._value

    async def run_async(self) -> Any:
        __tracebackhide__ = True
        entry = self._entry()
        try:
            with _signals_wake_the_loop():
                async with entry as self._region:
                    self._line.granted()
                    self._value = await self.compiled.run_async(self._shell)
                    self._ran = True
        finally:
            self._finish()
        return self._value

    def _entry(self) -> Exclusive:
        from .runtime.region import exclusive

        options = self._options
        device = list(options.device) if isinstance(options.device, tuple) else options.device
        entry = exclusive(
            device,
            timeout=options.timeout_s,
            max_hold=options.max_hold_s,
            cpu=options.cpu,
            foreign=options.foreign,
            label=options.label,
            strict=options.strict,
            on_queued=self._line.queued,
        )
        self._line.start()
        return entry

    def _finish(self) -> None:
        """Show and bind the report; called with the region left, whatever came of the cell."""
        failure = sys.exc_info()[1]
        report = None if self._region is None else self._region.report
        if report is not None and self._options.out:
            self._shell.user_ns[self._options.out] = report
        self._line.finish(report, failure if self._region is None else None)
        if failure is not None and self._ran and self._value is not None:
            # The cell did finish, and `strict` raises: its value is shown as in any cell, then the error.
            sys.displayhook(self._value)


@contextlib.contextmanager
def _signals_wake_the_loop() -> Iterator[None]:
    """Have a signal wake the running loop, so that Ctrl-C ends an ``await`` at once.

    ipykernel's handler asks the loop to cancel the cell, but a loop that sleeps in its selector does not hear
    of it: the system call is resumed after the handler. A plain ``await asyncio.sleep(5)`` in a cell ends
    after its 5 s, interrupted or not.
    """
    import asyncio

    if threading.current_thread() is not threading.main_thread():
        # A subshell: signals go to the main thread, and only that one may set the descriptor.
        yield
        return
    loop = asyncio.get_running_loop()
    woken, waking = socket.socketpair()
    with woken, waking:
        woken.setblocking(False)
        waking.setblocking(False)
        previous = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            # Somebody's loop handles signals already, and reads their numbers there: it is woken as it is.
            signal.set_wakeup_fd(previous)
            yield
            return
        loop.add_reader(woken, woken.recv, 4096)
        try:
            yield
        finally:
            loop.remove_reader(woken)
            signal.set_wakeup_fd(-1)


def _count(text: str = "20") -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"%krex history: {text!r} is not valid: valid is a number of reports, 1 or more")
    return int(text)


def _loop_runs() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# --- Joining ------------------------------------------------------------------------------------------------


class _Joining:
    """Makes this process a participant without holding up the cell that loads the extension.

    Starting a coordinator can take a while, so a thread does it. A thread's output after its cell has ended
    is lost in some front ends, so a failure is kept until a cell ends, and told there, once.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._notice = ""
        self._thread = threading.Thread(target=self._join, name="krex-join", daemon=True)

    def start(self) -> None:
        if sys.platform != "linux":
            print(f"KREX: regions need Linux, this is {sys.platform}; everything else works here.")
            return
        self._shell.events.register("post_run_cell", self._tell)
        self._thread.start()

    def undo(self) -> None:
        """Leave; waits for a join that is under way, or it would come after."""
        if self._thread.ident is None:
            return
        from .runtime.client import leave

        self._thread.join()
        with contextlib.suppress(ValueError):
            # It has told already, and is not registered any more.
            self._shell.events.unregister("post_run_cell", self._tell)
        leave()

    def _join(self) -> None:
        from .runtime.client import join

        try:
            join(kernel_id=_kernel_id(self._shell), notebook=os.environ.get("JPY_SESSION_NAME", ""))
        except (KrexError, OSError) as error:
            self._notice = f"KREX: not joined: {' '.join(str(error).split())}"

    def _tell(self, result: object = None) -> None:
        if self._thread.is_alive():
            return
        self._shell.events.unregister("post_run_cell", self._tell)
        if self._notice:
            print(self._notice, file=sys.stderr)


def _kernel_id(shell: Shell) -> str:
    """The kernel's id, from the name of its connection file; empty outside a kernel started by a server."""
    path = str(shell.config.get("IPKernelApp", {}).get("connection_file", ""))
    found = re.fullmatch(r"kernel-(.+)\.json", path.rsplit("/", 1)[-1])
    return found[1] if found else ""
