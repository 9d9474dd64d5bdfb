"""The history: what is stored is found again, and no file, however bad, stops anybody."""

from __future__ import annotations

import os
import queue
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from krex_jupyter.coordinator.history import SCHEMA_VERSION, History
from krex_jupyter.protocol import GetHistory, RegionReport, ReportDevice, Verdict
from tests.another_user import reachable_directory, run_as_another_user

PATIENCE_S = 10.0


def report(
    number: int,
    *,
    device: str = "GPU-a",
    label: str = "",
    verdict: Verdict = "clean",
    uid: int = 1000,
) -> RegionReport:
    return RegionReport(
        region_id=f"r{number}",
        epoch=number,
        device=ReportDevice(id="cuda:0", uuid=device, name="a GPU", vendor="nvidia"),
        label=label,
        pid=number,
        uid=uid,
        started_at=float(number),
        wait_s=0.1,
        enter_s=0.2,
        held_s=0.3,
        exit_s=0.4,
        cpu_policy="freeze",
        verdict=verdict,
    )


class Opened:
    """A history with its notices, asked from the test's thread."""

    def __init__(self, *candidates: Path, **also: Any) -> None:
        self.notices: list[str] = []
        self.history = History(list(candidates), self.notices.append, **also)

    def find(self, *, uid: int | None = None, **wanted: Any) -> list[str]:
        answers: queue.SimpleQueue[list[RegionReport]] = queue.SimpleQueue()
        self.history.find(GetHistory(request_id=1, **wanted), uid, answers.put)
        return [one.region_id for one in answers.get(timeout=PATIENCE_S)]

    def find_one(self, region_id: str, uid: int | None = None) -> list[RegionReport]:
        answers: queue.SimpleQueue[list[RegionReport]] = queue.SimpleQueue()
        self.history.find_one(region_id, uid, answers.put)
        return answers.get(timeout=PATIENCE_S)


@contextmanager
def opened(*candidates: Path, **also: Any) -> Iterator[Opened]:
    found = Opened(*candidates, **also)
    try:
        yield found
    finally:
        found.history.close()


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_reports_survive_the_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "below" / "history.db"
    with opened(path) as first:
        for number in (1, 2, 3):
            first.history.add(report(number))
    with opened(path) as second:
        assert second.find() == ["r3", "r2", "r1"]
        assert second.find_one("r2") == [report(2)]
        assert second.find_one("r9") == []
        assert second.notices == []
    assert schema_of(path) == SCHEMA_VERSION


def test_the_record_of_a_region_is_the_last_one_written(tmp_path: Path) -> None:
    with opened(tmp_path / "history.db") as one:
        one.history.add(report(1))
        one.history.add(report(1, label="again"))
        assert [found.label for found in one.find_one("r1")] == ["again"]


def test_filters_choose_and_combine(tmp_path: Path) -> None:
    with opened(tmp_path / "history.db") as one:
        one.history.add(report(1, label="naive"))
        one.history.add(report(2, label="tiled", verdict="contended"))
        one.history.add(report(3, device="GPU-b", label="naive", verdict="contended"))
        one.history.add(report(4, device="MIG_b", uid=1001))
        assert one.find() == ["r4", "r3", "r2", "r1"]
        assert one.find(limit=2) == ["r4", "r3"]
        assert one.find(limit=0) == ["r4"]
        assert one.find(since=2.0) == ["r4", "r3", "r2"]
        assert one.find(label="naive") == ["r3", "r1"]
        assert one.find(verdict="contended") == ["r3", "r2"]
        assert one.find(label="naive", verdict="contended") == ["r3"]
        assert one.find(device="GPU-") == ["r3", "r2", "r1"]
        assert one.find(device="GPU-b") == ["r3"]
        assert one.find(label="no such label") == []


@pytest.mark.parametrize("device", ["%", "GPU_a", "_"])
def test_a_device_filter_has_no_wildcards(tmp_path: Path, device: str) -> None:
    with opened(tmp_path / "history.db") as one:
        one.history.add(report(1, device="GPU-a"))
        assert one.find(device=device) == []


def test_a_user_finds_only_what_is_theirs(tmp_path: Path) -> None:
    with opened(tmp_path / "history.db") as one:
        one.history.add(report(1, uid=1000))
        one.history.add(report(2, uid=1001))
        assert one.find(uid=1000) == ["r1"]
        assert one.find_one("r2", uid=1000) == []
        assert one.find_one("r2", uid=1001) == [report(2, uid=1001)]
        assert one.find(uid=None) == ["r2", "r1"]


def test_a_filter_is_data_and_never_a_statement(tmp_path: Path) -> None:
    with opened(tmp_path / "history.db") as one:
        one.history.add(report(1))
        assert one.find(label="' OR 1=1 --") == []
        assert one.find() == ["r1"]
        assert one.notices == []


def test_old_reports_are_pruned(tmp_path: Path) -> None:
    with opened(tmp_path / "history.db", keep_reports=50) as one:
        for number in range(1000):
            one.history.add(report(number))
        found = one.find(limit=10_000)
        assert found[:50] == [f"r{number}" for number in range(999, 949, -1)]
        assert len(found) < 50 + 2 * 200


# --- Bad files -----------------------------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_left_as_it_is_and_memory_serves(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE report_of_the_future (id)")
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with opened(path) as one:
        one.history.add(report(1))
        assert one.find() == ["r1"]
        assert f"schema {SCHEMA_VERSION + 1}, made by a newer KREX" in one.notices[0]
        assert "memory only" in one.notices[1]
    assert path.read_bytes() == before
    with opened(path) as again:
        assert again.find() == []


def test_the_next_candidate_serves_where_the_best_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    best, next_best = tmp_path / "file" / "history.db", tmp_path / "other" / "history.db"
    with opened(best, next_best) as one:
        one.history.add(report(1))
        assert one.find() == ["r1"]
        assert len(one.notices) == 1
        assert str(best) in one.notices[0]
    with opened(next_best) as again:
        assert again.find() == ["r1"]


@pytest.mark.parametrize("content", [b"not a database " * 100, b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_file_that_is_no_database_is_left_as_it_is_and_memory_serves(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(content)
    with opened(path) as one:
        one.history.add(report(1))
        assert one.find() == ["r1"]
        assert "cannot be used" in one.notices[0]
    assert path.read_bytes() == content


def test_a_file_damaged_inside_is_said_once_and_every_question_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with opened(path) as one:
        for number in range(400):
            one.history.add(report(number))
    content = bytearray(path.read_bytes())
    # Sound are the first page, so that it opens, and nothing behind it.
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with opened(path) as one:
        for _ in range(3):
            assert one.find() == []
            assert one.find_one("r1") == []
            one.history.add(report(1))
        assert one.notices
        assert len(one.notices) == len(set(one.notices))


def test_what_cannot_be_written_delays_neither_answers_nor_the_end(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with opened(path) as one, closing(sqlite3.connect(path)) as other:
        assert one.find() == []
        other.execute("DROP TABLE report")
        one.history.add(report(1))
        assert one.find() == []
        one.history.add(report(2))
        one.history.close()
        assert not one.history._thread.is_alive()
        assert any("could not be written" in notice for notice in one.notices)


def test_a_report_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with opened(path) as one:
        for number in (1, 2, 3):
            one.history.add(report(number))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE report SET body = ? WHERE region_id = 'r2'", [b'{"verdict":"maybe"}'])
    with opened(path) as one:
        assert one.find() == ["r3", "r1"]
        assert one.find() == ["r3", "r1"]
        assert len(one.notices) == 1
        assert "left out" in one.notices[0]


READ_ONLY = """
with opened(Path(sys.argv[1])) as one:
    one.history.add(report(1))
    assert one.find() == ["r1"], one.find()
    print(*one.notices, sep="\\n")
"""


LOADED = "from tests.coordinator.test_history import *"


@pytest.fixture
def open_path() -> Iterator[Path]:
    with reachable_directory() as path:
        yield path


def test_in_a_directory_that_may_not_be_written_memory_serves(open_path: Path) -> None:
    directory = open_path / "read-only"
    directory.mkdir()
    directory.chmod(0o555)
    said = run_as_another_user(READ_ONLY, directory / "history.db", loaded=LOADED)
    assert "cannot be used" in said
    assert "memory only" in said
    assert list(directory.iterdir()) == []
    if os.getuid() == 0:
        # With the right to write, the same script does write: the check above means something.
        directory.chmod(0o777)
        assert run_as_another_user(READ_ONLY, directory / "history.db", loaded=LOADED).strip() == ""
        assert (directory / "history.db").exists()


def test_a_database_that_may_only_be_read_is_not_used(open_path: Path) -> None:
    directory = open_path / "read-only"
    path = directory / "history.db"
    with opened(path) as one:
        one.history.add(report(7))
    path.chmod(0o444)
    directory.chmod(0o555)
    said = run_as_another_user(READ_ONLY, path, loaded=LOADED)
    directory.chmod(0o755)
    assert "memory only" in said
    with opened(path) as one:
        assert one.find() == ["r7"]
