# ruff: noqa: RUF001
"""The magics in a real kernel and in a plain shell: a cell behaves as it would without its first line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from traitlets.config import Config

from krex_jupyter import magics
from krex_jupyter.magics import ExclusiveOptions, parse_exclusive
from krex_jupyter.runtime.queries import status
from tests.kernel_driver import Kernel, another_holder, private_socket, running_coordinator, running_kernel

REPORT_MIME = "application/vnd.krex.report.v1+json"


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Path]:
    with private_socket() as socket, running_coordinator(socket):
        yield socket


@pytest.fixture(scope="module")
def kernel(coordinator: Path) -> Iterator[Kernel]:
    with running_kernel(KREX_SOCKET=str(coordinator), KREX_DEVICE="cpu") as kernel:
        assert kernel.run("%load_ext krex_jupyter").reply["status"] == "ok"
        yield kernel


@pytest.fixture
def shell(coordinator: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A plain shell, as in a terminal, in this process."""
    monkeypatch.setenv("KREX_SOCKET", str(coordinator))
    monkeypatch.setenv("KREX_DEVICE", "cpu")
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell(config=config)
    magics.load(shell)
    try:
        yield shell
    finally:
        magics.unload(shell)
        assert os.getpid() not in [participant.pid for participant in status().participants]


def reports(cell: Any) -> list[dict[str, Any]]:
    shown = [*cell.of("display_data"), *cell.of("update_display_data")]
    return [content["data"][REPORT_MIME] for content in shown if REPORT_MIME in content["data"]]


# --- A cell as any other ------------------------------------------------------------------------------------


def test_the_last_expression_becomes_out(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive\nseven = 7\nseven * 6")
    assert cell.result == "42"
    count = cell.reply["execution_count"]
    assert kernel.run(f"_, Out[{count}], _{count}, seven").result == "(42, 42, 42, 7)"


def test_a_trailing_semicolon_shows_nothing(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive\n43; # and a comment")
    assert cell.result is None
    assert cell.reply["status"] == "ok"


def test_none_and_statements_show_nothing(kernel: Kernel) -> None:
    assert kernel.run("%%krex_exclusive\nNone").result is None
    assert kernel.run("%%krex_exclusive\nx = 1").result is None


@pytest.mark.parametrize(
    ("interactivity", "shown"),
    [("last_expr", ["2"]), ("all", ["1", "2"]), ("none", []), ("last_expr_or_assign", ["2"])],
)
def test_the_shells_choice_of_what_to_show_is_kept(
    shell: InteractiveShell, interactivity: str, shown: list[str]
) -> None:
    shell.ast_node_interactivity = interactivity
    body = "1\ny = 2" if interactivity == "last_expr_or_assign" else "1\n2"
    compiled = magics.compile_cell(shell, "", f"{body}\n")
    seen: list[Any] = []
    previous, sys.displayhook = sys.displayhook, seen.append
    try:
        value = compiled.run(shell)
    finally:
        sys.displayhook = previous
    assert [str(each) for each in [*seen, value] if each is not None] == shown


def test_a_traceback_names_the_line_that_the_editor_shows(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive -l lines\n\n\ndef inverse(x):\n    return 1 / x\n\ninverse(0)")
    assert cell.reply["ename"] == "ZeroDivisionError"
    number = cell.reply["execution_count"]
    assert re.findall(rf"Cell In\[{number}\], line (\d+)", cell.traceback) == ["1", "7", "5"]
    assert "----> 7 inverse(0)" in cell.traceback
    assert "krex_jupyter" not in cell.traceback.replace("magics_manager", "")


def test_source_can_be_read_in_the_cell_that_defines_it(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%krex_exclusive\nimport inspect\n"
        "def decorated(f):\n    print(inspect.getsource(f))\n    return f\n\n"
        "@decorated\ndef kernel_function(a):\n    return a + 1  # its comment"
    )
    assert cell.text.strip() == "@decorated\ndef kernel_function(a):\n    return a + 1  # its comment"


def test_magics_and_shell_commands_work_inside(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive\nwords = !echo one two\n%alias_magic -l t timeit\nwords")
    assert cell.result == "['one two']"


def test_a_syntax_error_is_reported_as_in_any_cell_and_takes_no_region(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive\nran = True\nx = = 1")
    assert cell.reply["ename"] == "SyntaxError"
    assert "line 3" in cell.traceback
    assert "run_cell_magic" not in cell.traceback
    assert reports(cell) == []


def test_names_that_the_cell_binds_are_bound_even_when_it_raises(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive --out raised\nbound = 5\nraise KeyError('mine')")
    assert cell.reply["ename"] == "KeyError"
    assert kernel.run("bound, raised.held_s > 0").result == "(5, True)"
    assert len(reports(cell)) == 1


def test_system_exit_is_reported_and_the_region_ends(kernel: Kernel) -> None:
    assert kernel.run("%%krex_exclusive\nraise SystemExit(3)").reply["ename"] == "SystemExit"
    assert kernel.run("%%krex_exclusive -t 5\n'next'").result == "'next'"


def test_a_region_inside_the_cell_is_the_same_region(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%krex_exclusive -t 5 --out outer\nimport krex_jupyter as krex\n"
        "with krex.exclusive(timeout=5) as inner:\n    pass\ninner.region_id"
    )
    assert cell.reply["status"] == "ok"
    assert cell.result == kernel.run("outer.region_id").result


# --- Await --------------------------------------------------------------------------------------------------


def test_a_cell_that_awaits_runs_on_the_kernels_own_loop(kernel: Kernel) -> None:
    kernel.run("import asyncio\nours = asyncio.get_running_loop() if False else None\nawait asyncio.sleep(0)")
    kernel.run(
        "theirs = asyncio.Event()\nloop = asyncio.get_event_loop()\nloop.call_later(0.05, theirs.set);"
    )
    cell = kernel.run("%%krex_exclusive -l awaits\nawait theirs.wait()\nasyncio.get_running_loop() is loop")
    assert cell.result == "True"
    assert [report["label"] for report in reports(cell)] == ["awaits"]


def test_an_awaited_last_expression_becomes_out_unless_a_semicolon_ends_it(kernel: Kernel) -> None:
    assert (
        kernel.run("%%krex_exclusive\nimport asyncio\nawait asyncio.sleep(0.01, 'value')").result == "'value'"
    )
    assert kernel.run("_").result == "'value'"
    assert kernel.run("%%krex_exclusive\nawait asyncio.sleep(0.01, 'value');").result is None


def test_a_cell_that_awaits_keeps_its_line_numbers(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0")
    assert "----> 4 1 / 0" in cell.traceback
    assert "krex_jupyter/" not in cell.traceback


def test_async_with_works_in_a_cell(kernel: Kernel) -> None:
    cell = kernel.run(
        "import krex_jupyter as krex\n"
        "async with krex.exclusive(label='plain') as region:\n    pass\nregion.report.label"
    )
    assert cell.result == "'plain'"


def test_a_cell_whose_await_nothing_can_await_says_so(kernel: Kernel) -> None:
    cell = kernel.run("get_ipython().run_cell_magic('krex_exclusive', '', 'await x') or 1")
    assert cell.reply["ename"] == "UsageError"
    assert "first line" in cell.text


def test_a_plain_shell_runs_a_cell_that_awaits(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell("%%krex_exclusive\nimport asyncio\nawait asyncio.sleep(0.01, 'value')")
    assert result.success, capsys.readouterr()
    assert result.result == "value"


# --- Interrupts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import time\nprint('ready', flush=True)\ntime.sleep(20)", "KeyboardInterrupt"),
        ("print('ready', flush=True)\nwhile True:\n    pass", "KeyboardInterrupt"),
        ("import asyncio\nprint('ready', flush=True)\nawait asyncio.sleep(20)", "CancelledError"),
    ],
    ids=["sleeping", "computing", "awaiting"],
)
def test_an_interrupt_ends_the_cell_within_200_ms(kernel: Kernel, body: str, error: str) -> None:
    delays_s = []
    for _ in range(3):
        message_id = kernel.start(f"%%krex_exclusive -t 5\n{body}")
        cell = kernel.wait(message_id, until="ready", interrupt=True)
        assert cell.reply["ename"] == error
        ready_s = next(m["at_s"] for m in cell.messages if m["msg_type"] == "stream")
        delays_s.append(cell.ended_at_s - ready_s)
    assert min(delays_s) < 0.2, delays_s


@pytest.mark.parametrize("body", ["1", "import asyncio\nawait asyncio.sleep(0)"], ids=["plain", "awaiting"])
def test_an_interrupt_ends_the_wait_within_200_ms(kernel: Kernel, coordinator: Path, body: str) -> None:
    delays_s = []
    with another_holder(coordinator, "long tuning"):
        for _ in range(3):
            message_id = kernel.start(f"%%krex_exclusive --cpu share\n{body}")
            cell = kernel.wait(message_id, until="position 1", interrupt=True)
            assert cell.reply["ename"] in ("KeyboardInterrupt", "CancelledError")
            assert reports(cell) == []
            waiting = [m["at_s"] for m in cell.messages if "position 1" in repr(m["content"])]
            delays_s.append(cell.ended_at_s - waiting[0])
    assert min(delays_s) < 0.2, delays_s
    assert kernel.run("%%krex_exclusive -t 5\n'next'").result == "'next'"


# --- What is shown ------------------------------------------------------------------------------------------


def test_the_badge_replaces_the_waiting_line_in_the_same_place(kernel: Kernel, coordinator: Path) -> None:
    with another_holder(coordinator, "long tuning") as holder:
        message_id = kernel.start("%%krex_exclusive --cpu share -l mine\nprint('inside')")
        waiting = kernel.wait(message_id, until="position 1")
        [first] = waiting.of("display_data")
        assert f"(pid {holder.pid})" in repr(waiting.messages)
        assert holder.stdin is not None
        holder.stdin.close()
        rest = kernel.wait(message_id)
    updates = rest.of("update_display_data")
    assert {update["transient"]["display_id"] for update in updates} == {first["transient"]["display_id"]}
    assert [report["label"] for report in reports(rest)] == ["mine"]
    assert "text/html" in updates[-1]["data"]
    assert rest.of("display_data") == []
    assert rest.text == "inside\n"


def test_a_saved_notebook_keeps_only_the_badge(coordinator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KREX_SOCKET", str(coordinator))
    monkeypatch.setenv("KREX_DEVICE", "cpu")
    sources = ["%load_ext krex_jupyter", "%%krex_exclusive -l saved\n5"]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=30, kernel_name="python3").execute()
    badge, result = notebook.cells[1].outputs
    assert badge.data[REPORT_MIME]["label"] == "saved"
    assert "<img" in badge.data["text/html"]
    assert result.data["text/plain"] == "5"


def test_quiet_shows_nothing(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive -q --out silent\n8")
    assert [m["msg_type"] for m in cell.messages if m["msg_type"] != "execute_input"] == [
        "status",
        "execute_result",
    ]
    assert kernel.run("type(silent).__name__").result == "'RegionReport'"


def test_a_plain_shell_shows_one_line(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell("%%krex_exclusive -l terminal\nanswer = 42").success
    [line] = capsys.readouterr().out.splitlines()
    assert re.match(r"[✓!×⊘?] \w+ · waited .* · held .* · entered in .* · cpu · terminal", line)
    assert shell.user_ns["answer"] == 42


def test_status_devices_and_history_are_tables(kernel: Kernel) -> None:
    kernel.run("%%krex_exclusive -l remembered\n1")
    assert "free" in (kernel.run("%krex").result or "")
    assert "uuid" in (kernel.run("%krex devices").result or "")
    history = kernel.run("%krex history 1").result or ""
    assert "remembered" in history
    assert len(history.splitlines()) == 2


def test_a_wait_that_is_too_long_says_so(kernel: Kernel, coordinator: Path) -> None:
    with another_holder(coordinator):
        cell = kernel.run("%%krex_exclusive -t 0.2 --cpu share\nran_too_early = 1")
    assert cell.reply["ename"] == "WaitTimeout"
    assert cell.of("update_display_data")[-1]["data"]["text/plain"] == "not entered: WaitTimeout"
    assert kernel.run("ran_too_early").reply["ename"] == "NameError"


# --- Strict -------------------------------------------------------------------------------------------------


def test_strict_raises_after_the_cells_value_is_shown_when_the_region_was_cut_short(kernel: Kernel) -> None:
    cell = kernel.run("%%krex_exclusive --strict --max-hold 0.1\nimport time\ntime.sleep(0.4)\n'done'")
    assert cell.reply["ename"] in ("RegionRevoked", "NotExclusive")
    assert cell.result == "'done'"
    assert [report["verdict"] for report in reports(cell)] == ["revoked"]


def test_strict_never_hides_the_cells_own_error(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%krex_exclusive --strict --max-hold 0.1\nimport time\ntime.sleep(0.4)\nraise KeyError('mine')"
    )
    assert cell.reply["ename"] == "KeyError"


# --- Options ------------------------------------------------------------------------------------------------


def test_every_option_is_read() -> None:
    line = "-d cuda:0,cuda:1 -t 2.5 --max-hold 0 --cpu share --foreign gate -l 'tile 32' --out r -q --strict"
    assert parse_exclusive(line, ExclusiveOptions()) == ExclusiveOptions(
        device=("cuda:0", "cuda:1"),
        timeout_s=2.5,
        max_hold_s=0.0,
        cpu="share",
        foreign="gate",
        label="tile 32",
        out="r",
        quiet=True,
        strict=True,
    )


def test_what_is_not_given_is_the_default() -> None:
    defaults = ExclusiveOptions(device="cpu", timeout_s=3.0, strict=True)
    assert parse_exclusive("", defaults) == defaults
    assert parse_exclusive("-t 4", defaults) == ExclusiveOptions(device="cpu", timeout_s=4.0, strict=True)


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        ("--bogus", "usage: %%krex_exclusive"),
        ("--time 3", "usage: %%krex_exclusive"),
        ("-t soon", "seconds, 0 or more"),
        ("-t nan", "seconds, 0 or more"),
        ("-t -1", "usage: %%krex_exclusive"),
        ("--max-hold 0", "--cpu share"),
        ("--cpu all", "isolate"),
        ("--foreign freeze", "observe"),
        ("--out 2x", "a Python name"),
        ("--out class", "a Python name"),
        ("-d cuda:0,", "cuda:0,cuda:1"),
        ("-l 'open", "No closing quotation"),
        ("stray", "usage: %%krex_exclusive"),
    ],
)
def test_a_bad_line_says_what_would_be_valid(line: str, valid: str) -> None:
    with pytest.raises(UsageError, match=re.escape(valid)):
        parse_exclusive(line, ExclusiveOptions())


def test_defaults_come_from_config_and_name_their_units(kernel: Kernel) -> None:
    kernel.run("%config KrexMagics.quiet = True")
    try:
        assert reports(kernel.run("%%krex_exclusive\n1")) == []
    finally:
        kernel.run("%config KrexMagics.quiet = False")
    assert "in seconds" in kernel.run("%config KrexMagics").text


def test_krex_refuses_what_it_does_not_know(kernel: Kernel) -> None:
    for line in ("bogus", "status now", "history zero", "history 0"):
        cell = kernel.run(f"%krex {line}")
        assert cell.reply["ename"] == "UsageError"
        assert "valid" in cell.text


# --- Loading ------------------------------------------------------------------------------------------------


def test_loading_makes_the_kernel_a_participant(kernel: Kernel) -> None:
    cell = kernel.run(
        "import krex_jupyter, os\n[p.pid for p in krex_jupyter.status().participants] == [os.getpid()]"
    )
    assert cell.result == "True"


def test_unloading_takes_everything_away_and_loading_twice_does_nothing(shell: InteractiveShell) -> None:
    magics.load(shell)
    assert len([c for c in shell.configurables if type(c).__name__ == "KrexMagics"]) == 1
    assert len(shell.input_transformers_post) == 1
    magics.unload(shell)
    assert shell.find_cell_magic("krex_exclusive") is None
    assert shell.input_transformers_post == []
    assert "KrexMagics" not in [type(c).__name__ for c in shell.configurables]
    magics.load(shell)
    assert shell.find_cell_magic("krex_exclusive") is not None


def test_unloading_while_still_joining_leaves_no_participant(shell: InteractiveShell) -> None:
    for _ in range(5):
        magics.unload(shell)
        magics.load(shell)
    magics.unload(shell)
    assert os.getpid() not in [participant.pid for participant in status().participants]


def test_without_any_coordinator_loading_works_and_says_one_line() -> None:
    with running_kernel(KREX_SOCKET="/proc/krex/krex.sock", KREX_DEVICE="cpu") as kernel:
        cell = kernel.run("%load_ext krex_jupyter")
        assert cell.reply["status"] == "ok"
        said = (
            cell.text
            + kernel.run(
                "import threading\n[t.join() for t in threading.enumerate() if t.name == 'krex-join'];"
            ).text
        )
        assert re.fullmatch(r"KREX: not joined: .*\n", said)
        assert kernel.run("%%krex_exclusive\n1").reply["ename"] == "CoordinatorUnavailable"


def test_elsewhere_than_on_linux_it_loads_and_regions_say_why_not(coordinator: Path) -> None:
    with running_kernel(KREX_SOCKET=str(coordinator), KREX_DEVICE="cpu") as kernel:
        kernel.run("import sys\nsys.platform = 'darwin'")
        cell = kernel.run("%load_ext krex_jupyter")
        assert cell.reply["status"] == "ok"
        assert "Linux" in cell.text
        assert kernel.run("%%krex_exclusive\n1").reply["ename"] == "UnsupportedPlatform"


def test_loading_imports_nothing_heavy_and_takes_under_50_ms() -> None:
    # What an installer does: else the first test after a checkout would time the byte-compiler.
    package = str(Path(magics.__file__).parent)
    subprocess.run([sys.executable, "-m", "compileall", "-q", package], check=True)
    with running_kernel(KREX_SOCKET="/proc/krex/krex.sock") as kernel:
        kernel.run("import sys, time\nbefore = set(sys.modules)")
        kernel.run(
            "began = time.perf_counter()\n%load_ext krex_jupyter\ntook_s = time.perf_counter() - began"
        )
        heavy = {
            "torch",
            "cupy",
            "pynvml",
            "jupyter_server",
            "tornado",
            "numpy",
            "ipywidgets",
            "numba",
            "sqlite3",
        }
        kernel.run("import threading\n[t.join() for t in threading.enumerate() if t.name == 'krex-join']")
        assert kernel.run(f"sorted((set(sys.modules) - before) & {heavy!r})").result == "[]"
        assert float(kernel.run("took_s").result or "nan") < 0.05


def test_importing_the_package_imports_no_ipython() -> None:
    code = (
        "import sys, krex_jupyter\n"
        "heavy = {'IPython', 'torch', 'tornado', 'msgspec', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
