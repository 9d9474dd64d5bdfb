"""Where the coordinator is: one place per user whatever the environment says, and nobody else's."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from krex_jupyter.errors import CoordinatorUnavailable
from krex_jupyter.locate import (
    checked_directory,
    connect,
    file_system,
    is_local,
    location,
    lock_directory,
    short_address,
    user_directory,
)
from tests.another_user import UID, other_uid, reachable_directory, run_as_another_user

ME = os.getuid()
ADDRESS_LIMIT_BYTES = 107
needs_root = pytest.mark.skipif(ME != 0, reason="needs root, to change uid")


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that somebody listens at, also where its path is too long for an address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_address(path) as address:
            listener.bind(address)
        listener.listen(1)
        yield listener


# --- The user's directory ------------------------------------------------------------------------------------------


def test_a_missing_directory_is_made_for_its_user_only(tmp_path: Path) -> None:
    made = checked_directory(tmp_path / "krex", ME)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert checked_directory(made, ME) == made


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o755, 0o770, 0o777, 0o1777])
def test_a_directory_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "krex"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(CoordinatorUnavailable, match=f"chmod 700 {directory}"):
        checked_directory(directory, ME)
    directory.chmod(0o700)
    assert checked_directory(directory, ME) == directory


@needs_root
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "krex"
    directory.mkdir(mode=0o700)
    os.chown(directory, UID, UID)
    with pytest.raises(CoordinatorUnavailable, match=f"belongs to uid {UID}, not to uid {ME}"):
        checked_directory(directory, ME)
    assert checked_directory(directory, UID) == directory


@pytest.mark.parametrize("target", ["directory", "nothing"])
def test_a_link_is_refused_wherever_it_points(tmp_path: Path, target: str) -> None:
    (tmp_path / "directory").mkdir(mode=0o700)
    link = tmp_path / "krex"
    link.symlink_to(tmp_path / target)
    with pytest.raises(CoordinatorUnavailable, match="cannot have it"):
        checked_directory(link, ME)
    assert not (tmp_path / "nothing").exists()


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "krex").write_text("in the way")
    with pytest.raises(CoordinatorUnavailable, match="KREX_SOCKET"):
        checked_directory(tmp_path / "krex", ME)


def test_a_directory_whose_parent_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnavailable, match="No such file"):
        checked_directory(tmp_path / "missing" / "krex", ME)


def test_a_directory_that_may_not_be_made_is_refused_and_says_what_to_do() -> None:
    with reachable_directory() as directory:
        directory.chmod(0o555)
        said = run_as_another_user(
            "try:\n"
            "    checked_directory(Path(sys.argv[1]), os.getuid())\n"
            "except CoordinatorUnavailable as error:\n"
            "    print(error)",
            directory / "krex",
            loaded="import os; from pathlib import Path; from krex_jupyter.locate import *",
        )
        assert "Permission denied" in said
        assert "KREX_SOCKET" in said


def test_only_local_file_systems_will_do() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/dev/shm")) == "tmpfs"
    assert is_local("tmpfs")
    assert is_local("ext4")
    for kind in ("nfs4", "nfs", "cifs", "fuse.sshfs", "9p", "lustre", "unknown"):
        assert not is_local(kind)


# --- One place per user --------------------------------------------------------------------------------------------

MEANT = {"XDG_RUNTIME_DIR", "TMPDIR", "TMP", "TEMP", "HOME", "USER", "LOGNAME"}
WHERE = "place = location(); print(place.socket, place.kind, user_directory(), lock_directory())"
LOADED = "from krex_jupyter.locate import location, lock_directory, user_directory"


@needs_root
def test_every_environment_leads_to_the_same_place() -> None:
    shared = Path(f"/dev/shm/krex-{UID}")
    assert not shared.exists(), "left behind by an earlier run"
    plain = {"KREX_SOCKET": "", "KREX_LOCK_DIR": ""}
    try:
        answers = {
            run_as_another_user(WHERE, loaded=LOADED, environment=plain | changed)
            for changed in (
                {},
                dict.fromkeys(MEANT, "/nonexistent"),
                {"XDG_RUNTIME_DIR": "/run/user/0", "TMPDIR": "/var/tmp", "HOME": "/root"},
                {"XDG_RUNTIME_DIR": "", "TMPDIR": "", "HOME": ""},
            )
        }
        assert len(answers) == 1
        path, kind, directory, locks = answers.pop().split()
        if kind == "user":
            assert path == f"{shared}/krex.sock"
        assert directory == locks == str(shared)
        assert shared.stat().st_uid == UID
        assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    finally:
        if shared.exists():
            shared.rmdir()


@needs_root
def test_a_place_that_somebody_else_took_first_is_refused() -> None:
    shared = Path(f"/dev/shm/krex-{UID}")
    shared.mkdir(mode=0o700)
    try:
        with pytest.raises(CoordinatorUnavailable, match=f"belongs to uid 0, not to uid {UID}"):
            user_directory(UID)
    finally:
        shared.rmdir()


def test_the_configured_socket_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KREX_SOCKET", str(tmp_path / "one.sock"))
    found = location()
    assert found.socket == tmp_path / "one.sock"
    assert found.kind == "configured"
    assert found.startable
    assert found.directory == tmp_path


def test_a_configured_socket_does_not_follow_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KREX_SOCKET", "one.sock")
    monkeypatch.chdir(tmp_path)
    found = location().socket
    monkeypatch.chdir("/")
    assert found == tmp_path / "one.sock"


def test_the_configured_lock_directory_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KREX_LOCK_DIR", str(tmp_path))
    assert lock_directory() == tmp_path


# --- Addresses and peers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("excess_bytes", [-1, 0, 1, 60])
def test_a_socket_is_reached_also_where_its_path_is_too_long_for_an_address(
    tmp_path: Path, excess_bytes: int
) -> None:
    missing = ADDRESS_LIMIT_BYTES + excess_bytes - len(os.fsencode(tmp_path / "krex.sock")) - 1
    assert missing > 0
    directory = tmp_path / ("é" * (missing // 2) + "x" * (missing % 2))
    directory.mkdir()
    path = directory / "krex.sock"
    assert len(os.fsencode(path)) == ADDRESS_LIMIT_BYTES + excess_bytes
    with listening(path) as listener, connect(path) as connection, closing(listener.accept()[0]) as accepted:
        connection.send(b"through")
        assert accepted.recv(100) == b"through"
        assert not connection.get_inheritable()
        assert connection.gettimeout() is None


def test_a_long_address_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    long = tmp_path / ("x" * 120) / "krex.sock"
    long.parent.mkdir()
    with short_address(long) as address:
        assert len(os.fsencode(address)) <= ADDRESS_LIMIT_BYTES
    with pytest.raises(FileNotFoundError):
        connect(long)
    assert os.listdir("/proc/self/fd") == before


def test_where_nobody_listens_the_caller_learns_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "krex.sock")
    with listening(tmp_path / "krex.sock"):
        pass
    with pytest.raises(ConnectionRefusedError):
        connect(tmp_path / "krex.sock")


LISTENS = """
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen(5)
print("ready", flush=True)
sys.stdin.read()
"""
CONNECTS = """
try:
    connect(Path(sys.argv[1])).close()
    print("connected")
except CoordinatorUnavailable as error:
    print(error)
"""
CONNECTS_LOADED = "from pathlib import Path; from krex_jupyter.locate import *"


@contextmanager
def listening_as(uid: int, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of another user that listens at ``path``."""
    changed = f"import os, socket, sys; os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
    with subprocess.Popen(
        [sys.executable, "-c", changed + LISTENS, str(path)],
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
            running.wait(10.0)


@needs_root
def test_who_listens_is_trusted_only_if_it_is_the_user_or_root() -> None:
    with reachable_directory() as directory:
        path = directory / "krex.sock"
        directory.chmod(0o777)
        stranger = UID + 1
        with listening_as(stranger, path) as running:
            said = run_as_another_user(CONNECTS, path, loaded=CONNECTS_LOADED)
            assert f"(pid {running.pid}) belongs to uid {stranger}" in said
            with pytest.raises(CoordinatorUnavailable, match="not trusted"):
                connect(path)
        path.unlink()
        for trusted in (0, other_uid()):
            with listening_as(trusted, path):
                assert run_as_another_user(CONNECTS, path, loaded=CONNECTS_LOADED) == "connected"
            path.unlink()
