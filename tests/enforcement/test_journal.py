"""The journal: however it was cut short, it names everything that may still be gated, and nobody else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from krex_jupyter.enforcement.journal import (
    Act,
    Journal,
    Outstanding,
    Record,
    State,
    boot_id,
    outstanding,
    pid_namespace,
)
from krex_jupyter.protocol import ProcessRef

PATIENCE_S = 30.0

processes = st.builds(
    ProcessRef, pid=st.integers(2, 5), start_ticks=st.integers(1, 2), inode=st.integers(0, 1)
)
writes = st.tuples(
    st.sampled_from(["lock", "freeze"]),
    st.sampled_from(["intent", "intent", "done", "failed", "undone"]),
    st.lists(processes, min_size=1, max_size=3),
    st.text(max_size=5),
)
Write = tuple[Act, State, list[ProcessRef], str]


def process(pid: int) -> ProcessRef:
    return ProcessRef(pid=pid, start_ticks=pid * 10, inode=pid * 100)


@contextmanager
def journal_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "journal"


def gated_after(written: list[Write]) -> dict[str, set[ProcessRef]]:
    """What is really gated once these records were written and what they announce was done."""
    gated: dict[str, set[ProcessRef]] = {"lock": set(), "freeze": set()}
    for act, state, named, _ in written:
        if state in ("intent", "done"):
            gated[act].update(named)
        else:
            gated[act].difference_update(named)
    return gated


def found_at(path: Path) -> dict[str, set[ProcessRef]]:
    found = outstanding(path)
    assert len(set(found.locked)) == len(found.locked)
    assert len(set(found.frozen)) == len(found.frozen)
    return {"lock": set(found.locked), "freeze": set(found.frozen)}


def write_all(path: Path, written: list[Write]) -> list[int]:
    """Write records; returns the file's size after each."""
    journal = Journal(path)
    sizes = []
    for act, state, named, region_id in written:
        journal.write(act, state, named, region_id)
        sizes.append(path.stat().st_size)
    return sizes


@given(st.lists(writes, max_size=8))
def test_a_whole_journal_names_exactly_what_is_gated(written: list[Write]) -> None:
    with journal_file() as path:
        write_all(path, written)
        assert found_at(path) == gated_after(written)


@given(st.lists(writes, min_size=1, max_size=6), st.data())
def test_a_journal_cut_at_any_byte_names_all_that_is_gated(written: list[Write], data: st.DataObject) -> None:
    with journal_file() as path:
        sizes = write_all(path, written)
        cut = data.draw(st.integers(0, sizes[-1]))
        path.write_bytes(path.read_bytes()[:cut])
        # A record is written before its act and after its undoing, so the last one, cut short, says nothing.
        whole = sum(size <= cut for size in sizes)
        really = gated_after(written[:whole])
        found = found_at(path)
        next_one = gated_after(written[: whole + 1])
        for act in ("lock", "freeze"):
            assert found[act] in (really[act], next_one[act])


@given(st.lists(writes, max_size=4), st.binary(max_size=40), st.lists(writes, max_size=4), st.data())
def test_garbage_of_a_torn_write_hides_no_record_before_or_after_it(
    before: list[Write], garbage: bytes, after: list[Write], data: st.DataObject
) -> None:
    with journal_file() as path:
        write_all(path, before)
        whole = path.read_bytes() if path.exists() else b""
        with journal_file() as torn_path:
            write_all(torn_path, [("freeze", "intent", [process(9)], "torn")])
            torn = torn_path.read_bytes()
        # Cut inside its body, so that it is no whole record.
        cut = data.draw(st.integers(0, len(torn) - 2))
        path.write_bytes(whole + torn[:cut] + garbage)
        write_all(path, after)
        found = found_at(path)
        for act, gated in gated_after(before + after).items():
            assert found[act] - {process(9)} == gated


@given(st.binary(max_size=300))
def test_a_file_of_garbage_names_nobody(garbage: bytes) -> None:
    with journal_file() as path:
        path.write_bytes(garbage)
        assert outstanding(path).empty


@given(st.lists(writes, min_size=1, max_size=3), st.data())
def test_a_changed_byte_never_names_anybody_new(written: list[Write], data: st.DataObject) -> None:
    with journal_file() as path:
        write_all(path, written)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        named = {one for write in written for one in write[2]}
        found = outstanding(path)
        assert {*found.locked, *found.frozen} <= named


@pytest.mark.parametrize(
    "elsewhere",
    [{"boot_id": "0000-another-boot"}, {"pid_namespace": 1}],
    ids=["another boot", "another pid namespace"],
)
def test_a_record_of_elsewhere_names_nobody_here(tmp_path: Path, elsewhere: dict[str, object]) -> None:
    path = tmp_path / "journal"
    here = Record(
        act="freeze",
        state="intent",
        processes=(process(7),),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
    )
    for record, expected in ((here, (process(7),)), (msgspec.structs.replace(here, **elsewhere), ())):
        body = msgspec.json.encode(record)
        path.write_bytes(b"%08x %s\n" % (zlib.crc32(body), body))
        assert outstanding(path).frozen == expected


def test_a_record_of_another_version_is_skipped_and_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_all(path, [("freeze", "intent", [process(7)], "")])
    body = b'{"act":"hibernate","state":"intent","processes":[]}'
    with path.open("ab") as file:
        file.write(b"%08x %s\n" % (zlib.crc32(body), body))
    write_all(path, [("lock", "intent", [process(8)], "")])
    assert outstanding(path) == Outstanding(frozen=(process(7),), locked=(process(8),))


def test_lock_and_freeze_of_one_process_are_undone_apart(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_all(
        path,
        [
            ("lock", "intent", [process(7), process(8)], "r"),
            ("freeze", "intent", [process(7), process(8)], "r"),
            ("lock", "failed", [process(8)], ""),
            ("freeze", "undone", [process(7)], ""),
        ],
    )
    assert outstanding(path) == Outstanding(frozen=(process(8),), locked=(process(7),))


def test_a_missing_or_cleared_journal_has_nothing_outstanding(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert outstanding(path).empty
    journal = Journal(path)
    journal.write("lock", "intent", [process(7)])
    assert not journal.outstanding().empty
    journal.clear()
    assert journal.outstanding().empty
    journal.write("lock", "intent", [process(8)])
    assert journal.outstanding().locked == (process(8),)


def test_the_journal_is_for_its_user_only_and_no_link_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path)
    assert path.stat().st_mode & 0o077 == 0
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(link)
    assert not (tmp_path / "elsewhere").exists()


# --- Several processes ---------------------------------------------------------------------------------------------


@contextmanager
def child(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``script``, says when it is ready, and is gone at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield running
        finally:
            running.kill()
            running.wait(PATIENCE_S)


WRITER = """
import sys
from pathlib import Path
from krex_jupyter.enforcement.journal import Journal
from krex_jupyter.protocol import ProcessRef
journal = Journal(Path(sys.argv[1]))
assert journal.try_lock()
journal.write("freeze", "intent", [ProcessRef(pid=7, start_ticks=70, inode=700)], "r")
journal.write("lock", "done", [ProcessRef(pid=8, start_ticks=80, inode=800)], "r")
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_one_process_wrote_another_reads_also_when_the_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    expected = Outstanding(frozen=(process(7),), locked=(process(8),))
    with child(WRITER, path):
        assert outstanding(path) == expected
    assert Journal(path).outstanding() == expected


def test_a_second_writer_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with child(WRITER, path):
        second = Journal(path)
        assert not second.try_lock()
    assert second.try_lock()
    assert not Journal(path).try_lock(), "also within one process"


FULL = """
import resource, sys
from pathlib import Path
from krex_jupyter.enforcement.journal import Journal
from krex_jupyter.protocol import ProcessRef
path = Path(sys.argv[1])
journal = Journal(path)
journal.write("freeze", "intent", [ProcessRef(pid=7, start_ticks=70, inode=700)], "r")
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, resource.RLIM_INFINITY))
try:
    journal.write("freeze", "intent", [ProcessRef(pid=9, start_ticks=90, inode=900)], "r")
except OSError as error:
    print("refused:", error, file=sys.stderr)
    refused = True
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert refused
journal.write("lock", "intent", [ProcessRef(pid=8, start_ticks=80, inode=800)], "r")
print("ready", flush=True)
"""


def test_a_write_that_did_not_fit_is_refused_and_hides_none_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with child(FULL, path):
        assert outstanding(path) == Outstanding(frozen=(process(7),), locked=(process(8),))
