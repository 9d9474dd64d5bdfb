"""Where the coordinator's socket and files are: one answer per user, whatever the environment says.

Two processes of one user with different ``XDG_RUNTIME_DIR``, ``TMPDIR`` or ``HOME`` (ssh, cron, docker exec, a
spawner) must meet at one coordinator, so the path follows from the uid alone: `DESIGN.md`, "Where the socket
is". ``KREX_SOCKET`` overrides it, for tests and for administrators.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import CoordinatorUnavailable

SOCKET_NAME = "krex.sock"
SYSTEM_DIRECTORY = Path("/run/krex")

_LOCAL_FILE_SYSTEMS = frozenset(
    {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs", "f2fs"}
)

_LONGEST_ADDRESS_BYTES = 107
_CONNECT_S = 2.0
"""A listener whose backlog stays full for so long is stopped or dead."""


@dataclass(frozen=True)
class Location:
    """A coordinator's place."""

    socket: Path
    kind: Literal["configured", "system", "user"]

    @property
    def directory(self) -> Path:
        """Where its journal and log are, too."""
        return self.socket.parent

    @property
    def startable(self) -> bool:
        """Whether a client may start a coordinator there; the system's is started by its administrator."""
        return self.kind != "system"


def location() -> Location:
    """The place of this user's coordinator; creates the user's directory where that is needed.

    Raises:
        CoordinatorUnavailable: the directory exists but is not safely ours.
    """
    configured = os.environ.get("KREX_SOCKET")
    if configured:
        return Location(Path(configured).absolute(), "configured")
    if _owned_by_root(SYSTEM_DIRECTORY / SOCKET_NAME):
        return Location(SYSTEM_DIRECTORY / SOCKET_NAME, "system")
    return Location(user_directory() / SOCKET_NAME, "user")


def user_directory(uid: int | None = None) -> Path:
    """This user's directory for sockets, journals and lock files, checked and created.

    Raises:
        CoordinatorUnavailable: it belongs to somebody else, is open to others, or is not on a local file system.
    """
    uid = os.getuid() if uid is None else uid
    session = Path(f"/run/user/{uid}")
    directory = session / "krex" if _is_private(session, uid) else Path(f"/dev/shm/krex-{uid}")  # noqa: S108 (named after the uid and checked below)
    return checked_directory(directory, uid)


def lock_directory() -> Path:
    """Where the lock file of each held device lies: one place per scope, so that two coordinators meet.

    ``KREX_LOCK_DIR`` overrides it. That is for tests of KREX itself, which run coordinators beside a real one:
    with different lock directories, two coordinators do *not* keep each other out.
    """
    configured = os.environ.get("KREX_LOCK_DIR")
    if configured:
        return Path(configured)
    if os.getuid() == 0 and _is_private(SYSTEM_DIRECTORY, 0, others_may_read=True):
        return SYSTEM_DIRECTORY
    return user_directory()


def checked_directory(directory: Path, uid: int) -> Path:
    """``directory``, created with mode 0700 where missing.

    Raises:
        CoordinatorUnavailable: owner, mode, kind or file system are not as they must be.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CoordinatorUnavailable(
            f"KREX needs its directory {directory} and cannot have it ({error.strerror}). "
            f"Remove what is there, or set KREX_SOCKET to a path in a directory of yours."
        ) from error
    try:
        found = os.fstat(fd)
        if found.st_uid != uid:
            raise CoordinatorUnavailable(
                f"{directory} belongs to uid {found.st_uid}, not to uid {uid}: somebody else put it there. "
                f"Ask the administrator to remove it, or set KREX_SOCKET to a path in a directory of yours."
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise CoordinatorUnavailable(
                f"{directory} has mode {stat.S_IMODE(found.st_mode):04o}; others could reach it. "
                f"Run: chmod 700 {directory}"
            )
        kind = file_system(directory)
        if not is_local(kind):
            raise CoordinatorUnavailable(
                f"{directory} is on a {kind} file system; sockets and locks need a local one. "
                f"Set KREX_SOCKET to a path on a local file system."
            )
    finally:
        os.close(fd)
    return directory


def connect(path: Path) -> socket.socket:
    """A blocking connection to the coordinator's socket; raises `OSError` where nobody listens.

    Raises:
        CoordinatorUnavailable: the one who listens is neither this user nor root.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(_CONNECT_S)
    try:
        with short_address(path) as address:
            connection.connect(address)
        connection.settimeout(None)
        pid, uid = peer_credentials(connection)
        if uid not in (0, os.getuid()):
            raise CoordinatorUnavailable(
                f"The process that answers at {path} (pid {pid}) belongs to uid {uid}, not to you or root. "
                f"It is not trusted. Remove that socket, or set KREX_SOCKET to a path of yours."
            )
    except BaseException:
        connection.close()
        raise
    return connection


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that opened, or listens at, the other end; pid 0 where it is not visible here."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """A name of ``path`` that fits a Unix socket address (107 bytes), for as long as the context lasts."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS_BYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _owned_by_root(socket: Path) -> bool:
    try:
        return socket.is_socket() and socket.lstat().st_uid == 0 and socket.parent.lstat().st_uid == 0
    except OSError:
        return False


def _is_private(directory: Path, uid: int, *, others_may_read: bool = False) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    forbidden = 0o022 if others_may_read else 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not stat.S_IMODE(found.st_mode) & forbidden


def is_local(kind: str) -> bool:
    """Whether a file system of this type is safe for sockets, locks and SQLite in WAL mode."""
    return kind in _LOCAL_FILE_SYSTEMS


def file_system(directory: Path) -> str:
    """Type of the file system that ``directory`` is on, from the mount with the longest matching path."""
    resolved = directory.resolve()
    best, kind = -1, "unknown"
    with Path("/proc/self/mountinfo").open(encoding="utf-8") as mounts:
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            mount = Path(fields.split()[4].replace("\\040", " "))
            if resolved.is_relative_to(mount) and len(mount.parts) >= best:
                best, kind = len(mount.parts), rest.split()[0]
    return kind
