"""``%krex_measure`` in a real kernel: it reads its statement as ``%timeit`` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel_driver import Kernel, private_socket, running_coordinator, running_kernel

MEASUREMENT_MIME = "application/vnd.krex.measurement.v1+json"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with (
        private_socket() as socket,
        running_coordinator(socket),
        running_kernel(KREX_SOCKET=str(socket), KREX_DEVICE="cpu") as kernel,
    ):
        assert kernel.run("%load_ext krex_jupyter").reply["status"] == "ok"
        yield kernel


def measurements(cell: Any) -> list[dict[str, Any]]:
    return [
        content["data"][MEASUREMENT_MIME]
        for content in cell.of("display_data")
        if MEASUREMENT_MIME in content["data"]
    ]


def test_a_line_is_measured_and_shown_and_returns_nothing(kernel: Kernel) -> None:
    cell = kernel.run("%krex_measure -t 0.1 sum(range(1000))")
    (found,) = measurements(cell)
    assert found["median_s"] > 0
    assert found["label"] == "sum(range(1000))"
    assert found["region"]["label"] == found["label"]
    assert cell.result is None


def test_o_returns_the_result_and_q_shows_nothing(kernel: Kernel) -> None:
    cell = kernel.run("found = %krex_measure -q -o -t 0.1 -l mine sum(range(1000))")
    assert measurements(cell) == []
    assert kernel.run("found.label, type(found).__name__").result == "('mine', 'Measurement')"


def test_the_statement_is_taken_as_it_is_written(kernel: Kernel) -> None:
    kernel.run("seen = set(); what = 'wrong'")
    cell = kernel.run("""%krex_measure -q -t 0.05 seen.add("{what} $what -t 'x'")""")
    assert cell.reply["status"] == "ok", cell.traceback
    assert kernel.run("seen").result == repr({"{what} $what -t 'x'"})


def test_names_that_are_assigned_stay_inside(kernel: Kernel) -> None:
    assert kernel.run("%krex_measure -q -t 0.05 inner_name = 1").reply["status"] == "ok"
    assert kernel.run("'inner_name' in dir()").result == "False"


def test_a_cells_first_line_is_setup_that_runs_once_in_the_same_scope(kernel: Kernel) -> None:
    kernel.run("runs = []")
    cell = kernel.run(
        "%%krex_measure -q -o -t 0.05 total = 0; runs.append('setup')\ntotal += 1\nlast = total"
    )
    assert cell.reply["status"] == "ok", cell.traceback
    assert kernel.run("runs").result == "['setup']"


def test_what_the_statement_raises_comes_through_and_nothing_is_held(kernel: Kernel) -> None:
    cell = kernel.run("%krex_measure -t 0.05 1 / 0")
    assert cell.reply["ename"] == "ZeroDivisionError"
    held = "import krex_jupyter as krex; [d.holder for d in krex.status().devices if d.holder]"
    assert kernel.run(held).result == "[]"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "nothing to measure"),
        ("-p nan f()", "no precision"),
        ("-p 200% f()", "no precision"),
        ("-t 0 f()", "no time"),
        ("--cache tepid f()", "cold, warm"),
        ("--timer sundial f()", "auto, host"),
        ("-d cpu,cuda:0 f()", "one device"),
        ("-Z f()", "option -Z not recognized"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(kernel: Kernel, line: str, says: str) -> None:
    cell = kernel.run(f"%krex_measure {line}")
    assert cell.reply["ename"] == "UsageError"
    assert says in cell.reply["evalue"]


def test_a_syntax_error_is_shown_as_one(kernel: Kernel) -> None:
    assert kernel.run("%krex_measure f(").reply["ename"] == "SyntaxError"


def test_precision_may_be_in_percent(kernel: Kernel) -> None:
    cell = kernel.run("%krex_measure -p 5% -t 0.1 sum(range(1000))")
    assert measurements(cell)[0]["precision"] == 0.05
