"""CPU isolation: the choice of cores, and masks that are set and taken back without damage."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krex_jupyter.enforcement.cpus import (
    Topology,
    full_cpuset,
    keep_off,
    parse_list,
    pinned,
    read_topology,
    reserve,
    restore,
)

FULL = full_cpuset()
needs_two_cores = pytest.mark.skipif(len(FULL) < 2, reason="needs two usable cores")
PATIENCE_S = 30.0


def topology(cores: int, *, threads: int = 1, nodes: int = 1) -> Topology:
    """Numbered as Linux does: first one thread of each physical core, then the others."""
    physical = cores // threads
    groups = tuple(
        frozenset(core + thread * physical for thread in range(threads)) for core in range(physical)
    )
    per_node = physical // nodes
    placed = {
        node: frozenset().union(*groups[node * per_node : (node + 1) * per_node]) for node in range(nodes)
    }
    return Topology(frozenset(range(cores)), groups, placed)


def test_hyper_threads_of_one_physical_core_are_reserved_together() -> None:
    assert reserve(topology(16, threads=2), {"GPU-a": None}) == {"GPU-a": (7, 15)}


def test_without_hyper_threads_two_cores_are_reserved() -> None:
    assert reserve(topology(16), {"GPU-a": None}) == {"GPU-a": (14, 15)}


def test_cores_are_taken_from_the_devices_node() -> None:
    reserved = reserve(topology(32, threads=2, nodes=2), {"GPU-a": 0, "GPU-b": 1})
    assert reserved == {"GPU-a": (7, 23), "GPU-b": (15, 31)}


def test_an_unknown_node_takes_any_core() -> None:
    assert reserve(topology(16, nodes=2), {"GPU-a": 5})["GPU-a"] == (14, 15)


def test_fewer_than_eight_usable_cores_are_left_alone() -> None:
    assert reserve(topology(7), {"GPU-a": 0}) == {"GPU-a": ()}
    assert reserve(topology(8), {"GPU-a": 0}) == {"GPU-a": (6, 7)}


def test_a_core_that_is_half_outside_the_cpuset_is_not_reserved() -> None:
    whole = topology(32, threads=2)
    limited = Topology(whole.usable - {31}, whole.groups, whole.nodes)
    assert reserve(limited, {"GPU-a": None}) == {"GPU-a": (14, 30)}


@given(
    cores=st.integers(1, 64),
    threads=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2]),
    devices=st.integers(0, 10),
    hidden=st.sets(st.integers(0, 63)),
)
def test_reserved_cores_are_usable_disjoint_and_at_most_half(
    cores: int, threads: int, nodes: int, devices: int, hidden: set[int]
) -> None:
    whole = topology(cores * threads, threads=threads, nodes=nodes)
    limited = Topology(whole.usable - hidden, whole.groups, whole.nodes)
    reserved = reserve(limited, {f"GPU-{number}": number % nodes for number in range(devices)})
    taken = [core for chosen in reserved.values() for core in chosen]
    assert len(reserved) == devices
    assert len(taken) == len(set(taken)) <= len(limited.usable) // 2
    assert set(taken) <= limited.usable
    for chosen in reserved.values():
        assert not chosen or len(chosen) >= 2
        for group in whole.groups:
            assert not group & set(chosen) or group <= set(chosen), "strangers share a physical core"


def test_the_kernels_lists_are_read() -> None:
    assert parse_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_list("") == frozenset()


def test_this_hosts_topology_covers_its_cpuset() -> None:
    found = read_topology()
    assert found.usable == FULL
    assert frozenset().union(*found.groups) >= FULL


def test_the_full_cpuset_is_seen_from_a_pinned_thread() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(FULL)})
    try:
        assert full_cpuset() == FULL
        assert os.sched_getaffinity(0) == {min(FULL)}
    finally:
        os.sched_setaffinity(0, before)


PROCESS = """
import os, sys, threading
def idle():
    started.set(); stop.wait()
os.sched_setaffinity(0, range(4096))
stop = threading.Event()
def more():
    global started
    started = threading.Event()
    threading.Thread(target=idle, daemon=True).start(); started.wait()
for _ in range(3): more()
if sys.argv[1:]: os.sched_setaffinity(threading.enumerate()[-1].native_id, {int(sys.argv[1])})
print("ready", flush=True)
for line in sys.stdin:
    more(); print("more", flush=True)
"""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process with four threads; a line to it makes one more. An argument pins its last thread there."""
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def one_more_thread(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "more\n"


def masks(pid: int) -> list[frozenset[int]]:
    return [frozenset(os.sched_getaffinity(int(tid.name))) for tid in Path(f"/proc/{pid}/task").iterdir()]


@needs_two_cores
def test_a_process_is_kept_off_with_every_thread_it_has_and_starts() -> None:
    reserved = {max(FULL)}
    with process() as child:
        moved = keep_off(child.pid, reserved, FULL)
        assert len(moved.changed) == 4
        one_more_thread(child)
        assert masks(child.pid) == [FULL - reserved] * 5
        restored = restore(child.pid, reserved, FULL)
        assert len(restored.changed) == 5
        assert masks(child.pid) == [FULL] * 5


@needs_two_cores
def test_keeping_off_twice_changes_nothing_more() -> None:
    with process() as child:
        keep_off(child.pid, {max(FULL)}, FULL)
        again = keep_off(child.pid, {max(FULL)}, FULL)
        assert again.changed == ()
        assert again.left_alone == ()


@needs_two_cores
def test_a_mask_of_somebody_elses_is_left_alone_both_ways() -> None:
    chosen = max(FULL)
    with process(str(chosen)) as child:
        moved = keep_off(child.pid, {chosen}, FULL)
        assert len(moved.changed) == 3
        assert len(moved.left_alone) == 1
        restore(child.pid, {chosen}, FULL)
        assert sorted(masks(child.pid), key=len) == [frozenset({chosen}), FULL, FULL, FULL]


@needs_two_cores
def test_a_mask_changed_since_is_not_restored() -> None:
    with process() as child:
        keep_off(child.pid, {max(FULL)}, FULL)
        os.sched_setaffinity(child.pid, {max(FULL)})
        restore(child.pid, {max(FULL)}, FULL)
        assert os.sched_getaffinity(child.pid) == {max(FULL)}


def test_a_process_that_is_gone_is_a_normal_outcome() -> None:
    with process() as child:
        pid = child.pid
    assert keep_off(pid, {0}, FULL).changed == ()
    assert restore(pid, {0}, FULL).changed == ()


def test_reserving_every_core_is_not_done() -> None:
    with process() as child:
        assert keep_off(child.pid, FULL, FULL).changed == ()
        assert masks(child.pid) == [FULL] * 4


@contextmanager
def thread_with_mask(mask: frozenset[int]) -> Iterator[None]:
    """The test's own thread, with this mask while inside."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mask)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("kept_off", [False, True])
@needs_two_cores
def test_only_the_measuring_thread_is_pinned_and_gets_its_mask_back(kept_off: bool) -> None:
    cores = frozenset({max(FULL)})
    before = FULL - cores if kept_off else FULL
    stop = threading.Event()
    bystander = threading.Thread(target=stop.wait)
    with thread_with_mask(before):
        bystander.start()
        try:
            with pinned(threading.get_native_id(), cores, FULL) as outcome:
                assert outcome.pinned
                assert os.sched_getaffinity(0) == cores
                assert os.sched_getaffinity(bystander.native_id or 0) == before
            assert os.sched_getaffinity(0) == before
            assert outcome.threads_born == ()
        finally:
            stop.set()
            bystander.join(PATIENCE_S)


@needs_two_cores
def test_threads_born_while_pinned_get_the_former_mask() -> None:
    cores = frozenset({max(FULL)})
    stop = threading.Event()
    with thread_with_mask(FULL):
        try:
            with pinned(threading.get_native_id(), cores, FULL) as outcome:
                pool = [threading.Thread(target=stop.wait) for _ in range(3)]
                for thread in pool:
                    thread.start()
                tids = [thread.native_id or 0 for thread in pool]
                assert all(os.sched_getaffinity(tid) == cores for tid in tids)
            assert all(os.sched_getaffinity(tid) == FULL for tid in tids)
            assert sorted(outcome.threads_born) == sorted(tids)
        finally:
            stop.set()
            for thread in pool:
                thread.join(PATIENCE_S)


@needs_two_cores
def test_a_mask_changed_by_the_body_stays() -> None:
    with thread_with_mask(FULL):
        with pinned(threading.get_native_id(), {max(FULL)}, FULL):
            os.sched_setaffinity(0, {min(FULL)})
        assert os.sched_getaffinity(0) == {min(FULL)}


@needs_two_cores
def test_the_mask_comes_back_when_the_body_raises() -> None:
    def body() -> None:
        with pinned(threading.get_native_id(), {max(FULL)}, FULL):
            raise KeyError("body")

    with thread_with_mask(FULL):
        with pytest.raises(KeyError):
            body()
        assert os.sched_getaffinity(0) == FULL


@needs_two_cores
def test_a_thread_that_somebody_pinned_elsewhere_is_not_pinned_again() -> None:
    everything = FULL | {max(FULL) + 1}
    with (
        thread_with_mask(frozenset({min(FULL)})),
        pinned(threading.get_native_id(), {max(FULL)}, everything) as outcome,
    ):
        assert not outcome.pinned
        assert "somebody else" in outcome.error
        assert os.sched_getaffinity(0) == {min(FULL)}


def test_without_reserved_cores_nothing_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    with pinned(threading.get_native_id(), (), FULL) as outcome:
        assert not outcome.pinned
        assert os.sched_getaffinity(0) == before
