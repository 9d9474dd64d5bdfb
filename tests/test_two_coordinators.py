"""More than one coordinator, or none: whoever comes second is refused with the name of the first, and what to do."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import krex_jupyter as krex
from krex_jupyter import app
from krex_jupyter.launch import python_command, start_coordinator
from krex_jupyter.locate import Location, location
from krex_jupyter.runtime import client
from tests.conftest import Place
from tests.scripts import REGION, Scripts, search_path, state_of, wait_frozen, wait_thawed, wait_until

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another uid")


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    """Run `krex serve` until it ends, which it is expected to do at once."""
    return subprocess.run(
        [sys.executable, "-m", "krex_jupyter.app", "serve", *options],
        env={**os.environ, "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize("foreground", [(), ("--foreground",)])
def test_a_second_coordinator_at_the_same_place_is_refused(place: Place, foreground: tuple[str, ...]) -> None:
    start_coordinator(location())
    first = place.coordinator()
    second = serve(*foreground)
    assert second.returncode == app.NO_COORDINATOR
    assert f"pid {first}" in second.stderr
    assert "krex serve --stop" in second.stderr
    with krex.exclusive("cpu", timeout=5):
        pass
    assert place.coordinator() == first


def test_another_state_directory_does_not_make_room_for_a_second_one(place: Place) -> None:
    """The first would go on without a socket, and with its regions."""
    start_coordinator(location())
    first = place.coordinator()
    second = serve("--state-dir", str(place.directory / "state"))
    assert second.returncode == app.NO_COORDINATOR
    assert f"pid {first}" in second.stderr
    with krex.exclusive("cpu", timeout=5):
        pass
    assert place.coordinator() == first


def test_one_state_directory_serves_one_coordinator(place: Place) -> None:
    start_coordinator(location())
    second = serve(
        "--socket", str(place.directory / "elsewhere" / "krex.sock"), "--state-dir", str(place.directory)
    )
    assert second.returncode == app.NO_COORDINATOR
    assert f"pid {place.coordinator()} at {place.socket}" in second.stderr
    with krex.exclusive("cpu", timeout=5):
        pass


def is_free(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_device_that_another_coordinator_holds_is_refused_while_held(
    scripts: Scripts, place: Place
) -> None:
    elsewhere = place.directory / "elsewhere" / "krex.sock"
    start_coordinator(location())
    first = place.coordinator()
    holder = scripts(REGION, "cpu", env={"KREX_SOCKET": str(elsewhere)})
    assert holder.line().startswith("held")
    second = int((elsewhere.parent / "coordinator.lock").read_text(encoding="ascii").split()[1])
    assert second != first
    with pytest.raises(krex.CoordinatorUnavailable, match=f"pid {second} at {elsewhere}.*KREX_SOCKET"):
        krex.exclusive("cpu", timeout=5).__enter__()
    holder.say("leave")
    assert holder.line().startswith("left")
    # The owner is answered a moment before its coordinator gives the lock back.
    wait_until(lambda: is_free(place.directory / "locks" / "cpu.lock"), "the device's lock is free", 1.0)
    with krex.exclusive("cpu", timeout=5) as region:
        again = scripts(REGION, "cpu", env={"KREX_SOCKET": str(elsewhere)})
        again.wait()
        assert f"pid {first} at {place.socket}" in again.errors()
    assert region.report is not None
    assert region.report.verdict in ("clean", "suspect")


def test_a_device_is_free_again_once_the_other_coordinator_was_killed(scripts: Scripts, place: Place) -> None:
    elsewhere = place.directory / "elsewhere" / "krex.sock"
    holder = scripts(REGION, "cpu", env={"KREX_SOCKET": str(elsewhere)})
    assert holder.line().startswith("held")
    with pytest.raises(krex.CoordinatorUnavailable):
        krex.exclusive("cpu", timeout=5).__enter__()
    holder.signal(signal.SIGKILL)
    holder.wait()
    other = int((elsewhere.parent / "coordinator.lock").read_text().split()[1])
    os.kill(other, signal.SIGKILL)
    wait_until(lambda: state_of(other) in ("", "Z"), "the other coordinator is gone", 5.0)
    with krex.exclusive("cpu", timeout=5):
        pass


def test_stopping_the_coordinator_sets_everybody_free(
    scripts: Scripts, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    sibling = scripts.sibling()
    holder, _ = scripts.holder()
    wait_frozen(sibling.pid)
    first = place.coordinator()
    assert app.main(["serve", "--stop"]) == 0
    assert str(first) in capsys.readouterr().out
    wait_thawed(sibling.pid, 1.0)
    wait_until(lambda: not place.daemons() or place.coordinator() != first, "it has ended")
    holder.say("leave")
    assert holder.line().split()[:2] == ["left", "revoked"]
    with krex.exclusive("cpu", timeout=5):
        pass


def test_a_coordinator_whose_starter_died_is_waited_for(place: Place) -> None:
    """It was on its way, without a sign of it, when another was started: only one of the two may serve."""
    for _ in range(4):
        orphan = subprocess.Popen(
            python_command(
                "krex_jupyter.coordinator",
                "--socket",
                str(place.socket),
                "--lock-dir",
                os.environ["KREX_LOCK_DIR"],
            ),
            stderr=subprocess.DEVNULL,
        )
        start_coordinator(location())
        assert krex.status().coordinator_pid == place.coordinator()
        orphan.wait(10)
        assert app.main(["serve", "--stop"]) == 0


def test_stopping_where_none_runs_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["serve", "--stop"]) == 0
    assert "no coordinator runs" in capsys.readouterr().out


AS_ANOTHER = """
import os, sys
import krex_jupyter as krex
# Before the change of uid: the package may lie where the other cannot read.
import krex_jupyter.runtime.region
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    with krex.exclusive("cpu", timeout=2):
        print("held", flush=True)
except krex.CoordinatorUnavailable as error:
    print("unavailable:", error, flush=True)
"""


@needs_root
@pytest.mark.parametrize("below", ["", "missing"])
def test_where_no_coordinator_can_be_started_the_error_says_what_to_do(
    scripts: Scripts, tmp_path: Path, below: str
) -> None:
    tmp_path.parent.parent.chmod(0o755)
    tmp_path.parent.chmod(0o755)
    tmp_path.chmod(0o755)
    found = scripts(AS_ANOTHER, env={"KREX_SOCKET": str(tmp_path / below / "krex.sock")})
    said = found.line()
    assert said.startswith("unavailable:")
    assert str(tmp_path) in said
    assert "KREX_SOCKET" in said


def test_where_none_answers_and_none_may_be_started_the_command_says_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.directory / "start.lock").mkdir()
    assert app.main(["status"]) == app.NO_COORDINATOR
    assert str(place.directory) in capsys.readouterr().err


LISTENS_AS_ANOTHER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setresuid(65534, 65534, 65534)
listener.bind(sys.argv[1])
listener.listen(8)
print("listens", flush=True)
sys.stdin.read()
"""


@needs_root
def test_a_socket_of_somebody_else_is_not_trusted(scripts: Scripts, place: Place) -> None:
    place.directory.chmod(0o777)
    other = scripts(LISTENS_AS_ANOTHER, str(place.socket))
    assert other.line() == "listens"
    with pytest.raises(krex.CoordinatorUnavailable, match=r"uid 65534.*not trusted"):
        krex.exclusive("cpu", timeout=2).__enter__()
    assert not place.daemons()


def test_the_systems_coordinator_is_not_started_by_a_user(place: Place) -> None:
    with pytest.raises(krex.CoordinatorUnavailable, match="administrator"):
        start_coordinator(Location(place.socket, "system"))
    client.leave()
