"""The record of past regions, in SQLite, on a thread of its own.

History is a convenience: whatever is wrong with its file is said once and never stops a region. A file on a
network file system would corrupt under WAL, so then the record is kept in the coordinator's own directory. All
database work happens on one thread; nothing of it lies between a request and its grant.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from krex_jupyter.protocol import GetHistory, RegionReport

SCHEMA_VERSION = 1
KEEP_REPORTS = 100_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS report (
    region_id TEXT PRIMARY KEY,
    started_at REAL NOT NULL,
    device TEXT NOT NULL,
    label TEXT NOT NULL,
    verdict TEXT NOT NULL,
    uid INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS report_started_at ON report (started_at);
"""
_BUSY_TIMEOUT_S = 2.0
_BATCH = 200


class History:
    """Stores and finds reports. Without a usable file it keeps them in memory, and says so."""

    def __init__(
        self, candidates: list[Path], notice: Callable[[str], None], *, keep_reports: int = KEEP_REPORTS
    ) -> None:
        """Start the thread.

        Args:
            candidates: files to try, best first.
            notice: called, from the history's thread, with what somebody should know.
            keep_reports: the newest so many are kept, give or take one batch.
        """
        self._candidates = candidates
        self._tell = notice
        self._told: set[str] = set()
        self._keep_reports = keep_reports
        self._work: queue.SimpleQueue[Callable[[sqlite3.Connection], None] | RegionReport | None] = (
            queue.SimpleQueue()
        )
        self._decoder = msgspec.json.Decoder(RegionReport)
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._serve, name="krex-history", daemon=True)
        self._thread.start()

    def add(self, report: RegionReport) -> None:
        """Store a report, soon."""
        self._work.put(report)

    def find(self, wanted: GetHistory, uid: int | None, then: Callable[[list[RegionReport]], None]) -> None:
        """Find reports, newest first, and call ``then`` from the history's thread.

        ``uid``: only this user's; None: everybody's.
        """
        conditions: list[str] = ["started_at >= ?"]
        values: list[str | float | int] = [wanted.since]
        if wanted.device:
            # Not LIKE: a name may hold its wildcards.
            conditions.append("substr(device, 1, length(?)) = ?")
            values += [wanted.device, wanted.device]
        if wanted.label:
            conditions.append("label = ?")
            values.append(wanted.label)
        if wanted.verdict:
            conditions.append("verdict = ?")
            values.append(wanted.verdict)
        self._find(conditions, values, uid, min(max(wanted.limit, 1), 10_000), then)

    def find_one(self, region_id: str, uid: int | None, then: Callable[[list[RegionReport]], None]) -> None:
        """As `find`, for one region."""
        self._find(["region_id = ?"], [region_id], uid, 1, then)

    def close(self) -> None:
        """Write what is left and end the thread."""
        self._work.put(None)
        self._thread.join(5.0)

    def _find(
        self,
        conditions: list[str],
        values: list[str | float | int],
        uid: int | None,
        limit: int,
        then: Callable[[list[RegionReport]], None],
    ) -> None:
        if uid is not None:
            conditions.append("uid = ?")
            values.append(uid)
        statement = (
            f"SELECT body FROM report WHERE {' AND '.join(conditions)} ORDER BY started_at DESC LIMIT ?"  # noqa: S608 (the conditions are this class's own literals)
        )

        def run(database: sqlite3.Connection) -> None:
            # Whoever asks gets an answer, also from a file that has gone bad.
            rows: list[tuple[bytes]] = []
            try:
                rows = database.execute(statement, [*values, limit]).fetchall()
            except sqlite3.Error as error:
                self._notice(f"the history could not be read ({error}); regions go on without it")
            found: list[RegionReport] = []
            for (body,) in rows:
                try:
                    found.append(self._decoder.decode(body))
                except msgspec.MsgspecError as error:
                    self._notice(f"the history has reports that cannot be read ({error}); they are left out")
            then(found)

        self._work.put(run)

    def _notice(self, text: str) -> None:
        """Say something, once."""
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _serve(self) -> None:
        database = self._open()
        added = 0
        while True:
            item = self._work.get()
            batch: list[RegionReport] = []
            while isinstance(item, RegionReport):
                batch.append(item)
                if len(batch) >= _BATCH or self._work.empty():
                    break
                item = self._work.get()
            if batch:
                # What came behind the batch (a question, the end) is served whether or not it can be written.
                try:
                    self._insert(database, batch)
                    added += len(batch)
                    if added >= _BATCH:
                        added = 0
                        self._prune(database)
                except sqlite3.Error as error:
                    self._notice(f"the history could not be written ({error}); regions go on without it")
            if item is None:
                break
            if not isinstance(item, RegionReport):
                item(database)
        with contextlib.suppress(sqlite3.Error):
            database.close()

    def _insert(self, database: sqlite3.Connection, batch: list[RegionReport]) -> None:
        with database:
            database.executemany(
                "INSERT OR REPLACE INTO report VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        r.region_id,
                        r.started_at,
                        r.device.uuid,
                        r.label,
                        r.verdict,
                        r.uid,
                        self._encoder.encode(r),
                    )
                    for r in batch
                ],
            )

    def _prune(self, database: sqlite3.Connection) -> None:
        with database:
            database.execute(
                "DELETE FROM report WHERE region_id IN "
                "(SELECT region_id FROM report ORDER BY started_at DESC LIMIT -1 OFFSET ?)",
                [self._keep_reports],
            )

    def _open(self) -> sqlite3.Connection:
        for path in self._candidates:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return _open_file(path)
            except (sqlite3.Error, OSError) as error:
                self._notice(f"the history at {path} cannot be used ({error})")
        self._notice("the history is kept in memory only, until the coordinator ends")
        return _prepare(sqlite3.connect(":memory:"))


def _open_file(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)
    try:
        _check_schema(database)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        return _prepare(database)
    except BaseException:
        database.close()
        raise


def _check_schema(database: sqlite3.Connection) -> None:
    found = int(database.execute("PRAGMA user_version").fetchone()[0])
    if found > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(
            f"it has schema {found}, made by a newer KREX; this one knows {SCHEMA_VERSION}"
        )


def _prepare(database: sqlite3.Connection) -> sqlite3.Connection:
    with database:
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return database
