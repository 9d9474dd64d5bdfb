"""`krex bench overhead`: how its figures are made, and a short real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krex_jupyter.bench import overhead

from .left_overs import REPOSITORY, processes_that_mention


def test_percentiles_are_nearest_ranks_in_milliseconds() -> None:
    assert overhead.percentiles_ms([value / 1e3 for value in range(1, 101)]) == {
        "p50": pytest.approx(50.0),
        "p99": pytest.approx(99.0),
    }


def test_no_values_are_not_zero() -> None:
    assert overhead.percentiles_ms([]) == {"p50": None, "p99": None}


@given(st.lists(st.floats(1e-6, 1), min_size=1))
def test_percentiles_are_values_that_were_measured(values_s: list[float]) -> None:
    found = overhead.percentiles_ms(values_s)
    assert {found["p50"], found["p99"]} <= {value * 1e3 for value in values_s}


def test_every_case_is_measured_spaced_and_back_to_back() -> None:
    found = overhead.cases(8)
    assert [(case.siblings, case.state) for case in found[::2]] == [(0, "idle"), (8, "idle"), (8, "busy")]
    assert {case.spacing_s for case in found} == {0.0, overhead.SPACED_S}
    assert {case.siblings for case in overhead.cases(0)} == {0}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_overhead_is_measured_with_real_kernels_and_nothing_is_left() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kb-", dir="/tmp") as place,
        tempfile.TemporaryDirectory(prefix="kl-", dir="/tmp") as locks,
    ):
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "krex_jupyter.app",
                "bench",
                "overhead",
                "--siblings",
                "2",
                "--regions",
                "10",
                "--json",
                "-d",
                "cpu",
            ],
            env={**os.environ, "TMPDIR": place, "KREX_LOCK_DIR": locks, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=140,
        )
        assert process.returncode == 0, process.stderr
        assert not processes_that_mention(place)
        assert list(Path(place).iterdir()) == []
    document = json.loads(process.stdout)
    assert document["command"] == "overhead"
    rows = document["rows"]
    assert [(row["siblings"], row["state"], row["spacing"]) for row in rows] == [
        (0, "idle", "20 ms"),
        (0, "idle", "back to back"),
        (2, "idle", "20 ms"),
        (2, "idle", "back to back"),
        (2, "busy", "20 ms"),
        (2, "busy", "back to back"),
    ]
    for row in rows:
        assert row["enter_ms"]["p50"] <= row["enter_ms"]["p99"]
        assert row["siblings_seen"] == row["siblings"]
        assert row["gate"] == ("freeze" if row["siblings"] else "none")
