"""Regions on the cpu device, from the user's side: what a region does, and what it does when things go wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

import krex_jupyter as krex
from krex_jupyter.runtime import client
from tests.conftest import Place
from tests.scripts import Scripts, is_frozen, wait_frozen, wait_thawed, wait_until


def test_a_busy_sibling_makes_no_progress_inside_and_goes_on_outside(scripts: Scripts) -> None:
    sibling, counter = scripts.counting()
    with krex.exclusive("cpu") as region:
        at_start = counter.value
        assert is_frozen(sibling.pid)
        end_s = time.monotonic() + 0.1
        while time.monotonic() < end_s:
            pass
        assert counter.value == at_start
    wait_until(lambda: counter.value > at_start, "the sibling goes on")
    assert region.report is not None
    (found,) = region.report.siblings
    assert (found.pid, found.gate, found.frozen) == (sibling.pid, "freeze", True)
    assert region.report.evidence.siblings is not None
    assert region.report.evidence.siblings.frozen_threads >= 1
    assert region.report.evidence.siblings.ran == ()
    assert not {reason.code for reason in region.report.reasons} & {"sibling_ran", "evidence_missing"}


def test_a_region_alone_has_a_report_with_evidence(place: Place) -> None:
    with krex.exclusive("cpu", label="alone") as region:
        sum(range(10_000))
    report = region.report
    assert report is not None
    assert report.label == "alone"
    assert report.device.uuid == "cpu"
    assert report.evidence.owner is not None
    assert report.evidence.owner.run_queue_delay_s is not None
    assert report.verdict in ("clean", "suspect")
    assert krex.report(region.region_id) == report
    assert [found.region_id for found in krex.history()] == [region.region_id]


def test_epochs_grow(place: Place) -> None:
    epochs = []
    for _ in range(3):
        with krex.exclusive("cpu") as region:
            epochs.append(region.epoch)
    assert epochs == sorted(set(epochs))


def test_a_region_inside_a_region_of_the_same_thread_is_the_same(place: Place) -> None:
    with krex.exclusive("cpu") as outer, krex.exclusive("cpu") as inner:
        assert inner is outer
    assert outer.report is not None


def test_another_thread_queues_like_another_participant(place: Place) -> None:
    order: list[str] = []
    queued = threading.Event()

    def other() -> None:
        with krex.exclusive("cpu", on_queued=lambda _: queued.set()):
            order.append("other")

    thread = threading.Thread(target=other)
    with krex.exclusive("cpu"):
        thread.start()
        assert queued.wait(5.0)
        order.append("first")
    thread.join(5.0)
    assert order == ["first", "other"]


def test_a_thread_may_share_the_region_that_started_it(place: Place) -> None:
    found: list[str] = []
    with krex.exclusive("cpu") as region:

        def work() -> None:
            with region.share(), krex.exclusive("cpu", timeout=0) as inside:
                found.append(inside.region_id)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(5.0)
    assert found == [region.region_id]


def test_two_tasks_take_turns(place: Place) -> None:
    inside = 0
    most = 0

    async def task() -> str:
        nonlocal inside, most
        async with krex.exclusive("cpu") as region:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1
        assert region.report is not None
        return region.report.verdict

    async def both() -> list[str]:
        return list(await asyncio.gather(task(), task()))

    assert len(asyncio.run(both())) == 2
    assert most == 1


def test_a_cancelled_task_leaves_the_queue(scripts: Scripts) -> None:
    scripts.holder()

    async def wait_and_cancel() -> None:
        waiting = asyncio.Event()

        async def wait() -> None:
            async with krex.exclusive("cpu", on_queued=lambda _: waiting.set()):
                pass

        task = asyncio.create_task(wait())
        await asyncio.wait_for(waiting.wait(), 5.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(wait_and_cancel())
    assert krex.status().devices[-1].queue == ()


def test_a_decorated_function_runs_in_a_region_each_time(place: Place) -> None:
    @krex.exclusive("cpu", label="decorated")
    def work(x: int) -> int:
        return x + 1

    @krex.exclusive("cpu", label="decorated")
    async def work_later(x: int) -> int:
        return x + 2

    assert work(1) == 2
    assert asyncio.run(work_later(1)) == 3
    assert [report.label for report in krex.history()] == ["decorated", "decorated"]


def test_an_exception_ends_the_region_and_goes_on(place: Place) -> None:
    with pytest.raises(ZeroDivisionError), krex.exclusive("cpu", strict=True) as region:
        raise ZeroDivisionError
    assert region.report is not None
    with krex.exclusive("cpu", timeout=1.0):
        pass


def test_an_unknown_device_says_what_there_is(place: Place) -> None:
    with pytest.raises(krex.DeviceNotFound, match="cpu"), krex.exclusive("GPU-does-not-exist"):
        pass


def test_isolate_on_the_cpu_device_is_refused_with_what_to_use(place: Place) -> None:
    with pytest.raises(krex.UnsupportedPlatform, match="freeze"), krex.exclusive("cpu", cpu="isolate"):
        pass


@pytest.mark.parametrize(
    ("option", "value"), [("timeout", -1.0), ("max_hold", float("nan")), ("cpu", "fast"), ("foreign", "kill")]
)
def test_a_bad_option_is_refused_before_anything_happens(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        krex.exclusive("cpu", **{option: value})  # type: ignore[arg-type]


def test_no_limit_is_allowed_only_where_nobody_is_stopped(place: Place) -> None:
    with pytest.raises(krex.KrexError, match="share"), krex.exclusive("cpu", max_hold=0):
        pass
    with krex.exclusive("cpu", max_hold=0, cpu="share") as region:
        assert region.max_hold_s == 0


def test_share_lets_siblings_run(scripts: Scripts) -> None:
    sibling, counter = scripts.counting()
    with krex.exclusive("cpu", cpu="share") as region:
        at_start = counter.value
        wait_until(lambda: counter.value > at_start, "the sibling runs")
    assert not is_frozen(sibling.pid)
    assert region.report is not None
    assert region.report.cpu_policy == "share"


def test_waiting_too_long_names_the_holder(scripts: Scripts) -> None:
    holder, _ = scripts.holder()
    started_s = time.monotonic()
    with pytest.raises(krex.WaitTimeout, match=str(holder.pid)), krex.exclusive("cpu", timeout=0.3):
        pass
    assert 0.3 <= time.monotonic() - started_s < 1.0


_ASK = """
import sys, time, krex_jupyter as krex
started = time.monotonic()
try:
    with krex.exclusive("cpu", timeout=float(sys.argv[1]), on_queued=lambda _: print("queued", flush=True)):
        print("held", flush=True)
        sys.stdin.readline()
except krex.WaitTimeout:
    print("timed out after", time.monotonic() - started, flush=True)
"""


def test_a_waiter_is_not_frozen_so_its_timeout_fires_on_time(scripts: Scripts) -> None:
    """Frozen, it would come when the other region ends: 0.5 s once fired after 3.0 s."""
    with krex.exclusive("cpu", cpu="share"):
        second = scripts(_ASK, "60")
        assert second.line() == "queued"
        waiter = scripts(_ASK, "1.5")
        assert waiter.line() == "queued"
        asked_s = time.monotonic()
        # Long enough to see that it truly waits: one that still runs is frozen like anybody else.
        wait_until(lambda: time.monotonic() - asked_s > 0.1, "it has waited for a while")
    while (line := second.line()) == "queued":
        pass
    assert line == "held"
    while (line := waiter.line()) == "queued":
        assert not is_frozen(waiter.pid)
    assert 1.4 < float(line.removeprefix("timed out after ")) < 2.2


def test_zero_timeout_tries_once(scripts: Scripts) -> None:
    scripts.holder()
    with pytest.raises(krex.WaitTimeout), krex.exclusive("cpu", timeout=0):
        pass


def test_ctrl_c_while_queued_comes_at_once_and_leaves_the_queue(scripts: Scripts) -> None:
    scripts.holder()
    interrupted_s = []

    def interrupt() -> None:
        interrupted_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with (
        pytest.raises(KeyboardInterrupt),
        krex.exclusive("cpu", on_queued=lambda _: threading.Timer(0.1, interrupt).start()),
    ):
        pass
    assert time.monotonic() - interrupted_s[0] < 0.2
    assert krex.status().devices[-1].queue == ()


def test_ctrl_c_inside_the_region_ends_it_and_is_reported(scripts: Scripts) -> None:
    sibling = scripts.sibling()
    with pytest.raises(KeyboardInterrupt), krex.exclusive("cpu") as region:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    wait_thawed(sibling.pid, 1.0)
    assert region.report is not None
    assert "interrupted" in {reason.code for reason in region.report.reasons}


def test_past_max_hold_siblings_go_on_and_the_verdict_says_so(scripts: Scripts) -> None:
    sibling = scripts.sibling()
    with krex.exclusive("cpu", max_hold=0.3) as region:
        assert is_frozen(sibling.pid)
        started_s = time.monotonic()
        while is_frozen(sibling.pid):
            assert time.monotonic() - started_s < 1.5
        assert time.monotonic() - started_s > 0.25
    assert region.report is not None
    assert region.report.verdict == "revoked"
    with (
        pytest.raises(krex.RegionRevoked, match="max_hold"),
        krex.exclusive("cpu", max_hold=0.05, strict=True),
    ):
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            pass


def test_strict_never_hides_the_bodys_exception(place: Place) -> None:
    with pytest.raises(ZeroDivisionError), krex.exclusive("cpu", max_hold=0.05, strict=True):
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass
        raise ZeroDivisionError


def test_an_owner_that_waits_for_a_frozen_sibling_is_not_left_waiting(scripts: Scripts) -> None:
    helper = scripts.sibling(
        "import sys\nfrom krex_jupyter.runtime import client\nclient.join('helper'); print('joined', flush=True)\n"
        "for line in sys.stdin: print('answer', flush=True)\n"
    )
    with krex.exclusive("cpu") as region:
        helper.say("question")
        assert helper.line(10.0) == "answer"
    assert region.report is not None
    assert region.report.verdict == "revoked"
    assert "peers" in region.report.reasons[0].detail


def test_a_named_peer_is_not_frozen(scripts: Scripts) -> None:
    peer = scripts.sibling()
    other = scripts.sibling()
    with krex.exclusive("cpu", peers=[peer.pid]):
        assert is_frozen(other.pid)
        assert not is_frozen(peer.pid)


def test_a_plain_child_of_the_owner_runs_inside_its_region(scripts: Scripts) -> None:
    owner = scripts(
        "import subprocess, sys, krex_jupyter as krex\n"
        "with krex.exclusive('cpu', timeout=10):\n"
        "    child = subprocess.run([sys.executable, '-c', 'print(42)'], capture_output=True, timeout=5)\n"
        "    print(child.stdout.decode(), flush=True)\n"
    )
    assert owner.line() == "42"


def test_a_participant_that_appears_during_a_region_waits_like_the_others(scripts: Scripts) -> None:
    with krex.exclusive("cpu") as region:
        late = scripts(
            "import sys\n"
            "from krex_jupyter.runtime import client\n"
            "client.join('late'); print('joined', flush=True); sys.stdin.read()"
        )
        wait_frozen(late.pid)
    wait_thawed(late.pid)
    assert late.line() == "joined"
    assert region.report is not None
    assert late.pid in {sibling.pid for sibling in region.report.siblings}


def test_a_hand_off_never_thaws_who_is_gated_for_both(scripts: Scripts) -> None:
    with krex.exclusive("cpu", cpu="share"):
        bystander, counter = scripts.counting()
        owners = [scripts(_ASK, "60") for _ in range(2)]
        for owner in owners:
            assert owner.line() == "queued"
    first, second = owners
    while first.line() != "held":
        pass
    wait_frozen(bystander.pid)
    at_hand_off = counter.value
    first.say("leave")
    while second.line() != "held":
        pass
    assert is_frozen(bystander.pid)
    assert counter.value == at_hand_off


def test_peaceful_coexistence_of_many_owners(scripts: Scripts) -> None:
    """Four scripts, ten regions each, all at once: nobody is ever inside together, and all get their turns."""
    code = (
        "import fcntl, os, sys, krex_jupyter as krex\n"
        "from krex_jupyter.runtime import client\n"
        "client.join('owner'); print('joined', flush=True); sys.stdin.readline()\n"
        "fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)\n"
        "for _ in range(10):\n"
        "    with krex.exclusive('cpu', timeout=60):\n"
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "        sum(range(20000))\n"
        "        fcntl.flock(fd, fcntl.LOCK_UN)\n"
        "print('done', flush=True)\n"
    )
    lock = os.environ["KREX_LOCK_DIR"] + "/alone"
    owners = [scripts(code, "owner", lock) for _ in range(4)]
    for owner in owners:
        assert owner.line() == "joined"
    for owner in owners:
        owner.say("go")
    for owner in owners:
        assert owner.line(60.0) == "done"
    assert len(krex.history()) == 40


def test_a_coordinator_that_nobody_needs_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from krex_jupyter.launch import start_coordinator
    from krex_jupyter.locate import location

    start_coordinator(location(), options=("--idle-exit", "0.3"))
    pid = place.coordinator()
    with krex.exclusive("cpu"):
        pass
    client.leave()
    wait_until(lambda: pid not in place.daemons(), "the coordinator has ended", 5.0)


def test_the_next_region_starts_a_new_coordinator_after_the_last_one_ended(place: Place) -> None:
    with krex.exclusive("cpu"):
        pass
    os.kill(place.coordinator(), signal.SIGTERM)
    wait_until(lambda: not place.daemons(), "the coordinator has ended")
    with krex.exclusive("cpu") as region:
        pass
    assert region.report is not None
