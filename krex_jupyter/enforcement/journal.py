"""What the guardian is about to do, written down before it does it, so that any death can be undone.

The journal is a file of one-line records, each with its own checksum, written by one ``write`` call. It guards
against the death of processes, not of the machine (after a reboot nothing is frozen), so nothing is synced to
disk. Its writer holds an exclusive lock on it for life: a new guardian waits for the old one to be really gone.

`outstanding` turns a journal, however it was cut short, into the processes that may still be frozen or locked.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from krex_jupyter.protocol import ProcessRef

Act: TypeAlias = Literal["lock", "freeze"]
State: TypeAlias = Literal["intent", "done", "failed", "undone"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One act on some processes, and how far it got."""

    act: Act
    state: State
    processes: tuple[ProcessRef, ...]
    region_id: str = ""
    boot_id: str
    pid_namespace: int


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that may still be gated, by what would have to be undone."""

    frozen: tuple[ProcessRef, ...]
    locked: tuple[ProcessRef, ...]

    @property
    def empty(self) -> bool:
        """Nothing to undo."""
        return not self.frozen and not self.locked


class Journal:
    """The open journal of a living guardian. Only the guardian makes one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._path = path
        self._boot_id = boot_id()
        self._pid_namespace = pid_namespace()
        self._encoder = msgspec.json.Encoder()

    def try_lock(self) -> bool:
        """Take the writer's lock if nobody has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def outstanding(self) -> Outstanding:
        """What the previous guardian left behind."""
        return outstanding(self._path)

    def write(self, act: Act, state: State, processes: Iterable[ProcessRef], region_id: str = "") -> None:
        """Add a record. Raises `OSError` where it cannot be written: then the act must not happen."""
        record = Record(
            act=act,
            state=state,
            processes=tuple(processes),
            region_id=region_id,
            boot_id=self._boot_id,
            pid_namespace=self._pid_namespace,
        )
        line = _line(self._encoder.encode(record))
        if os.write(self._fd, line) != len(line):
            raise OSError(f"the journal {self._path} took only a part of a record; is its file system full?")

    def clear(self) -> None:
        """Nothing is gated any more."""
        os.ftruncate(self._fd, 0)


def outstanding(path: Path) -> Outstanding:
    """What the journal at ``path`` says may still be gated; reading needs no lock.

    Records of another boot or pid namespace are skipped: their pids mean nothing here. So are lines cut short
    by a death (whatever they announced had not happened yet), and what is no record of this version.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    here = (boot_id(), pid_namespace())
    decoder = msgspec.json.Decoder(Record)
    open_acts: dict[Act, dict[ProcessRef, None]] = {"freeze": {}, "lock": {}}
    for line in content.splitlines():
        checksum, _, body = line.partition(b" ")
        if checksum != _checksum(body):
            continue
        try:
            record = decoder.decode(body)
        except msgspec.MsgspecError:
            # Another version's: a guardian that fails here would leave everything else frozen, too.
            continue
        if (record.boot_id, record.pid_namespace) != here:
            continue
        acts = open_acts[record.act]
        for process in record.processes:
            if record.state in ("intent", "done"):
                acts[process] = None
            else:
                acts.pop(process, None)
    return Outstanding(frozen=tuple(open_acts["freeze"]), locked=tuple(open_acts["lock"]))


def boot_id() -> str:
    """Identity of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> int:
    """Inode of this process's pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _line(body: bytes) -> bytes:
    # The first newline ends whatever a writer that died, or a full file system, left unfinished.
    return b"\n" + _checksum(body) + b" " + body + b"\n"


def _checksum(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)
