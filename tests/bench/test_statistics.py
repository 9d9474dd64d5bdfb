"""The stopping rule on simulated processes: a hundred seeds here, 2,000 in `krex bench statistics`."""

from __future__ import annotations

import pytest

from krex_jupyter.bench.statistics import Process, independent, measure_statistics, processes, simulate

JUDGED = [process for process in processes() if process.judged]


def test_all_six_processes_are_judged() -> None:
    assert len(JUDGED) == 6


@pytest.mark.parametrize("process", JUDGED, ids=lambda process: process.name)
def test_the_rule_keeps_its_word(process: Process) -> None:
    row = simulate(process, seeds=60)
    if process.truth is None:
        assert row["settled_share"] == 0.0
    elif row["coverage95"] is not None:
        # 94% is judged on 2,000 seeds; of 60, an interval that holds in 95% holds at least 52 (p = 0.4%).
        assert row["coverage95"] >= 52 / 60
    assert row["passed"] or process.truth is not None


@pytest.mark.parametrize("process", [JUDGED[0], JUDGED[5]], ids=lambda process: process.name)
def test_quiet_processes_do_settle(process: Process) -> None:
    assert simulate(process, seeds=30)["settled_share"] == 1.0


def test_a_wrong_truth_is_noticed() -> None:
    """The benchmark's own negative control: were the intervals wrong, it would say so."""
    row = simulate(Process("displaced", independent(0.01), truth=1.02), seeds=30)
    assert row["coverage95"] < 0.5
    assert not row["passed"]


def test_the_document_has_a_row_per_process_and_a_verdict() -> None:
    said: list[str] = []
    document = measure_statistics(seeds=2, limits=False, say=said.append)
    assert document["version"] == 1
    assert len(document["rows"]) == 6
    assert len(said) == 7
    assert isinstance(document["passed"], bool)
