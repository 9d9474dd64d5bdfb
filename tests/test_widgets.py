"""The monitor in a real kernel: live while a cell runs, never in the way of a measurement."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from krex_jupyter.display import UPDATE_INTERVAL_S
from krex_jupyter.widgets import Pace
from tests.kernel_driver import Kernel, another_holder, private_socket, running_coordinator, running_kernel

CLOSED = (
    "import threading\nmonitor.close()\n[t.name for t in threading.enumerate() if t.name == 'krex-monitor']"
)


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with private_socket() as socket, running_coordinator(socket):
        yield socket


@pytest.fixture
def kernel(socket: Path) -> Iterator[Kernel]:
    with running_kernel(KREX_SOCKET=str(socket), KREX_DEVICE="cpu") as kernel:
        kernel.run("%load_ext krex_jupyter")
        kernel.run("import krex_jupyter as krex\nmonitor = krex.Monitor()\nmonitor")
        kernel.wait_for_widget("free")
        yield kernel
        closed = kernel.run(CLOSED)
        assert closed.result == "[]", closed.traceback + closed.text


def test_it_follows_holder_and_verdicts_while_a_cell_runs(kernel: Kernel, socket: Path) -> None:
    running = kernel.start("print('ready', flush=True)\nimport time; time.sleep(60)")
    kernel.wait(running, until="ready")
    with another_holder(socket, "tile 32"):
        assert "exclusive: tile 32" in kernel.wait_for_widget("exclusive")
    assert "tile 32" in kernel.wait_for_widget("free")
    kernel.interrupt()
    assert kernel.wait(running).reply["ename"] == "KeyboardInterrupt"


def test_the_line_magic_shows_one(kernel: Kernel) -> None:
    cell = kernel.run("%krex monitor")
    [shown] = cell.of("execute_result")
    assert "application/vnd.jupyter.widget-view+json" in shown["data"]
    kernel.run(f"Out[{cell.reply['execution_count']}].close()")


def test_a_busy_queue_changes_it_at_most_four_times_a_second(kernel: Kernel, socket: Path) -> None:
    script = (
        "import krex_jupyter as krex, time\n"
        "end_s = time.monotonic() + 2\n"
        "while time.monotonic() < end_s:\n"
        "    with krex.exclusive('cpu', cpu='share', label='many'):\n"
        "        pass\n"
        "with krex.exclusive('cpu', cpu='share', label='the last'):\n"
        "    pass\n"
    )
    environment = {"KREX_SOCKET": str(socket), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as busy:
        kernel.wait_for_widget("the last")
        assert busy.wait(timeout=20) == 0
    times_s = [at_s for at_s, value in kernel.widget_values if "many" in value]
    assert len(times_s) > 3
    span_s = times_s[-1] - times_s[0]
    assert len(times_s) - 1 <= span_s / UPDATE_INTERVAL_S + 1


def test_nothing_is_drawn_while_this_kernel_measures(kernel: Kernel, socket: Path) -> None:
    script = "import krex_jupyter as krex\nkrex.exclusive('cpu', timeout=20, label='neighbour').__enter__()"
    kernel.run("import subprocess, sys")
    cell = kernel.run(
        "%%krex_exclusive --cpu share -l measuring\n"
        f"neighbour = subprocess.Popen([sys.executable, '-c', {script!r}])\n"
        "before = monitor.children[0].value\n"
        "import time; time.sleep(1.0)\n"
        "unchanged = monitor.children[0].value == before"
    )
    assert cell.reply["status"] == "ok", cell.traceback
    kernel.wait_for_widget("measuring")
    assert kernel.run("neighbour.wait(timeout=20), unchanged").result == "(0, True)"


def test_a_lost_coordinator_is_named_with_the_remedy_and_found_again() -> None:
    with private_socket() as socket, running_kernel(KREX_SOCKET=str(socket), KREX_DEVICE="cpu") as kernel:
        kernel.run("import krex_jupyter as krex\nmonitor = krex.Monitor()\nmonitor")
        shown = kernel.wait_for_widget("no coordinator")
        assert "krex serve" in shown
        with running_coordinator(socket):
            kernel.wait_for_widget("free")
        kernel.wait_for_widget("no coordinator")
        began_s = time.monotonic()
        closed = kernel.run(CLOSED)
        assert closed.result == "[]", closed.traceback + closed.text
        assert time.monotonic() - began_s < 3


def test_a_kernel_with_an_open_monitor_ends_at_once(socket: Path) -> None:
    with running_kernel(KREX_SOCKET=str(socket), KREX_DEVICE="cpu") as kernel:
        kernel.run("import krex_jupyter as krex\nmonitor = krex.Monitor()\nmonitor")
        kernel.wait_for_widget("free")
        assert kernel.ends_when_asked(within_s=5)


def test_drawing_is_due_only_after_a_change_and_a_pause() -> None:
    pace = Pace(0.25)
    assert pace.due_in_s(0.0) is None
    pace.change()
    assert pace.due_in_s(0.0) == 0.0
    pace.drawn(10.0)
    assert pace.due_in_s(10.1) is None
    pace.change()
    assert pace.due_in_s(10.1) == pytest.approx(0.15)
    assert pace.due_in_s(10.3) == 0.0


def test_drawing_waits_for_the_end_of_a_measurement() -> None:
    pace = Pace(0.25)
    pace.change()
    pace.measuring = True
    assert pace.due_in_s(0.0) is None
    pace.measuring = False
    assert pace.due_in_s(0.0) == 0.0
