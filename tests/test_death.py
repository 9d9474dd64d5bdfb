"""Invariant 5: whatever dies or stops, within a second nothing of its region stands frozen, and the queue moves on."""

from __future__ import annotations

import json
import os
import signal
import time

import msgspec
import pytest

import krex_jupyter as krex
from tests.conftest import Place
from tests.scripts import Scripts, is_frozen, state_of, wait_frozen, wait_thawed, wait_until

BOUND_S = 1.0


def spin(duration_s: float) -> None:
    """Use the CPU, as a measurement does."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        pass


def test_owner_killed_thaws_siblings_and_serves_the_next(scripts: Scripts) -> None:
    sibling = scripts.sibling()
    holder, region_id = scripts.holder()
    wait_frozen(sibling.pid)
    holder.signal(signal.SIGKILL)
    assert wait_thawed(sibling.pid) < BOUND_S
    with krex.exclusive("cpu", timeout=5):
        pass
    report = krex.report(region_id)
    assert report.verdict == "revoked"
    assert "owner_died" in report.reasons[0].detail


def test_a_forked_child_of_the_owner_keeps_nothing_alive(scripts: Scripts) -> None:
    sibling = scripts.sibling()
    owner = scripts(
        "import os, sys, time, krex_jupyter as krex\n"
        "region = krex.exclusive('cpu').__enter__()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    import select; select.select([sys.stdin], [], [], 30); os._exit(0)\n"
        "print(pid, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    child = int(owner.line())
    wait_frozen(sibling.pid)
    owner.signal(signal.SIGKILL)
    try:
        assert wait_thawed(sibling.pid) < BOUND_S
        with krex.exclusive("cpu", timeout=5):
            pass
        assert state_of(child) not in ("", "Z")
    finally:
        os.kill(child, signal.SIGKILL)


def test_leaving_a_region_in_a_forked_child_does_nothing(scripts: Scripts) -> None:
    sibling = scripts.sibling()
    owner = scripts(
        "import os, sys, krex_jupyter as krex\n"
        "with krex.exclusive('cpu') as region:\n"
        "    if os.fork() == 0:\n"
        "        sys.exit(0)\n"
        "    os.wait()\n"
        "    print('child left', flush=True)\n"
        "    sys.stdin.readline()\n"
        "print(region.report.verdict, flush=True)\n"
    )
    assert owner.line() == "child left"
    assert is_frozen(sibling.pid)
    owner.say("leave")
    assert owner.line() in ("clean", "suspect")


def test_coordinator_killed_thaws_siblings_and_marks_the_region(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    with krex.exclusive("cpu") as region:
        assert is_frozen(sibling.pid)
        os.kill(place.coordinator(), signal.SIGKILL)
        assert wait_thawed(sibling.pid) < BOUND_S
    assert region.report is not None
    assert region.report.verdict == "revoked"
    with krex.exclusive("cpu", timeout=5) as region:
        pass
    assert region.report is not None


def test_coordinator_stopped_thaws_siblings(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    coordinator = -1
    with krex.exclusive("cpu") as region:
        coordinator = place.coordinator()
        os.kill(coordinator, signal.SIGSTOP)
        assert wait_thawed(sibling.pid) < BOUND_S
        # The owner's own watch replaces it meanwhile; the body notices nothing.
        wait_until(lambda: state_of(coordinator) in ("", "Z"), "the stopped coordinator was ended", 3.0)
    assert region.report is not None
    assert region.report.verdict == "revoked"
    with krex.exclusive("cpu", timeout=5):
        pass


def test_guardian_killed_thaws_siblings_and_is_replaced(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    with krex.exclusive("cpu") as region:
        guardian = place.guardian()
        os.kill(guardian, signal.SIGKILL)
        assert wait_thawed(sibling.pid) < BOUND_S
    assert region.report is not None
    assert region.report.verdict == "revoked"
    with krex.exclusive("cpu", timeout=5) as region:
        assert is_frozen(sibling.pid)
    assert place.guardian() != guardian
    assert any("guardian" in notice for notice in krex.status().notices)


def test_guardian_stopped_thaws_siblings_and_is_replaced(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    with krex.exclusive("cpu") as region:
        guardian = place.guardian()
        os.kill(guardian, signal.SIGSTOP)
        assert wait_thawed(sibling.pid) < BOUND_S
    assert region.report is not None
    assert region.report.verdict == "revoked"
    assert state_of(guardian) == ""
    with krex.exclusive("cpu", timeout=5):
        assert is_frozen(sibling.pid)


def test_both_killed_thaws_siblings_while_the_owner_lives(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    with krex.exclusive("cpu") as region:
        guardian, coordinator = place.guardian(), place.coordinator()
        os.kill(guardian, signal.SIGKILL)
        os.kill(coordinator, signal.SIGKILL)
        assert wait_thawed(sibling.pid) < BOUND_S
    assert region.report is not None
    assert region.report.verdict == "revoked"
    with krex.exclusive("cpu", timeout=5):
        wait_frozen(sibling.pid)


def test_both_stopped_thaws_siblings_while_the_owner_lives(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    with krex.exclusive("cpu"):
        guardian, coordinator = place.guardian(), place.coordinator()
        os.kill(guardian, signal.SIGSTOP)
        os.kill(coordinator, signal.SIGSTOP)
        # Noticed by the owner's ping (0.25 s apart, 0.4 s late), then a new coordinator has to start.
        assert wait_thawed(sibling.pid) < 2 * BOUND_S
    with krex.exclusive("cpu", timeout=5):
        # It rejoins by itself, maybe only now, and is then frozen like others that appear late.
        wait_frozen(sibling.pid)


def test_everybody_killed_is_undone_by_the_next_start(scripts: Scripts, place: Place) -> None:
    sibling = scripts.sibling()
    holder, _ = scripts.holder()
    wait_frozen(sibling.pid)
    for pid in (place.guardian(), place.coordinator(), holder.pid):
        os.kill(pid, signal.SIGKILL)
    holder.wait()
    wait_until(lambda: not place.daemons(), "all daemons are gone")
    if is_frozen(sibling.pid):
        # Nobody of that region lives: the sibling's own watch may or may not have started another coordinator.
        assert krex.status().participants is not None
    wait_thawed(sibling.pid)


def test_krex_thaw_undoes_what_everybody_left(scripts: Scripts, place: Place) -> None:
    sleeper = scripts("import sys; print('up', flush=True); sys.stdin.read()")
    assert sleeper.line() == "up"
    from krex_jupyter.enforcement.journal import Journal
    from krex_jupyter.enforcement.processes import ProcessHandle

    place.directory.mkdir(exist_ok=True)
    handle = ProcessHandle.open(sleeper.pid)
    dead = scripts(
        "import sys, json\nfrom pathlib import Path\nfrom krex_jupyter.enforcement.journal import Journal\n"
        "from krex_jupyter.protocol import ProcessRef\n"
        "j = Journal(Path(sys.argv[1])); j.try_lock()\n"
        "j.write('freeze', 'intent', [ProcessRef(**json.loads(sys.argv[2]))])\n",
        str(place.journal),
        json.dumps(msgspec.to_builtins(handle.process)),
    )
    assert dead.wait() == 0
    sleeper.signal(signal.SIGSTOP)
    wait_frozen(sleeper.pid)
    from krex_jupyter.app import main

    assert main(["thaw"]) == 0
    wait_thawed(sleeper.pid)
    assert Journal(place.journal).outstanding().empty
    handle.close()


@pytest.mark.parametrize("victim", ["sibling", "owner", "guardian", "coordinator"])
def test_dying_at_any_moment_of_an_entry_leaves_nothing_frozen(
    scripts: Scripts, place: Place, victim: str
) -> None:
    """Many entries, each cut short at another moment; afterwards a region works and nobody stands frozen."""
    bystanders = [scripts.sibling(label=f"bystander {number}") for number in range(3)]
    for attempt in range(6):
        doomed = scripts.sibling(label="doomed")
        owner = scripts(
            "import sys, time, krex_jupyter as krex\n"
            "from krex_jupyter.runtime import client\n"
            "client.join('owner'); print('joined', flush=True); sys.stdin.readline()\n"
            "for _ in range(200):\n"
            "    try:\n"
            "        with krex.exclusive('cpu', timeout=20): pass\n"
            "    except krex.KrexError: pass\n"
        )
        assert owner.line() == "joined"
        pid = {
            "sibling": doomed.pid,
            "owner": owner.pid,
            "guardian": place.guardian(),
            "coordinator": place.coordinator(),
        }[victim]
        owner.say("go")
        spin(0.01 + 0.007 * attempt)
        os.kill(pid, signal.SIGKILL)
        owner.signal(signal.SIGCONT)
        owner.signal(signal.SIGKILL)
        owner.wait()
        for bystander in bystanders:
            wait_thawed(bystander.pid, 3.0)
        doomed.end()
    with krex.exclusive("cpu", timeout=10):
        for bystander in bystanders:
            # Where the coordinator died they rejoin by themselves, maybe only now.
            wait_frozen(bystander.pid)


def test_an_owner_killed_while_queued_leaves_the_queue(scripts: Scripts) -> None:
    with krex.exclusive("cpu", cpu="share"):
        waiter = scripts(
            "import krex_jupyter as krex\n"
            "with krex.exclusive('cpu', on_queued=lambda _: print('queued', flush=True)): pass\n"
        )
        assert waiter.line() == "queued"
        waiter.signal(signal.SIGKILL)
        waiter.wait()
        wait_until(lambda: krex.status().devices[-1].queue == (), "the queue is empty", 2.0)


def test_a_coordinator_born_in_a_script_survives_it(scripts: Scripts, place: Place) -> None:
    """Also when the script's whole process group is killed, as a Jupyter server does with its kernels."""
    mother = scripts(
        "import sys, krex_jupyter as krex\n"
        "with krex.exclusive('cpu'): pass\n"
        "print('done', flush=True); sys.stdin.read()",
        start_new_session=True,
    )
    assert mother.line() == "done"
    coordinator = place.coordinator()
    os.killpg(mother.pid, signal.SIGKILL)
    mother.wait()
    with krex.exclusive("cpu") as region:
        pass
    assert place.coordinator() == coordinator
    assert region.epoch == 2
