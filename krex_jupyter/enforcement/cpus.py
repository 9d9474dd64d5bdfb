"""CPU isolation: which cores to reserve for a device, keeping processes off them, pinning who measures.

Linux keeps a CPU mask per *thread*, and a new thread inherits that of the thread that made it. Everything
here follows from that:

- Masks of siblings are set once, when they join, never per region: a mask set and taken back around each
  region is inherited by whatever thread starts meanwhile, and 138 of 391 threads kept a narrow mask that way.
- A mask that is not the whole cpuset was set by somebody on purpose (taskset, Slurm, a library) and is not
  touched; on the way back only a mask that is still exactly ours is.
- Only the measuring thread is pinned. A thread pool that it starts meanwhile inherits one or two cores for
  ever, unless given back the mask from before: `Pinned.threads_born` tells, and `pinned` repairs.

Never raises for a process or thread that is gone or not ours: those are counted in the results.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MIN_CORES: Final = 8
"""Usable cores below which nothing is reserved: two of fewer would take too much from everybody else."""
RESERVED_PER_DEVICE: Final = 2
"""Measured: two cores bring timings beside 16 or 48 busy processes back to quiet."""

_MAX_CPU_NUMBER: Final = 4096
_MAX_PASSES: Final = 8
"""Passes over a process's threads: each catches threads that one not yet moved has started meanwhile."""
_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Topology:
    """Where cores are. ``groups``: logical cores that share a physical one. ``nodes``: by NUMA node."""

    usable: frozenset[int]
    groups: tuple[frozenset[int], ...]
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """What was done to a process's threads."""

    changed: tuple[int, ...] = ()
    left_alone: tuple[int, ...] = ()
    """Threads with a mask of somebody else's."""
    failed: tuple[int, ...] = ()
    """Threads that live and that the kernel did not let us change."""


@dataclass
class Pinned:
    """What `pinned` did; complete after its end."""

    cores: frozenset[int]
    pinned: bool = False
    error: str = ""
    """Why the thread was not pinned: its mask was chosen by somebody else, or the kernel refused."""
    threads_born: tuple[int, ...] = ()
    """Threads that started pinned with it and have been given its former mask."""


def reserve(
    topology: Topology, device_nodes: Mapping[str, int | None], min_cores: int = MIN_CORES
) -> dict[str, tuple[int, ...]]:
    """Cores to reserve for each device (``device_nodes``: by UUID, its NUMA node or None), sorted; pure.

    Two logical cores: both hyper-threads of one physical core where there are such, on the device's node
    where it has enough, from the highest number down (interrupts and everybody's first thread favour the
    lowest). Never more than half of the usable cores in all: later devices then get none. All get none where
    fewer than ``min_cores`` are usable.
    """
    reserved: dict[str, tuple[int, ...]] = dict.fromkeys(device_nodes, ())
    if len(topology.usable) < min_cores:
        return reserved
    free = set(topology.usable)
    budget = len(topology.usable) // 2
    for uuid in sorted(device_nodes):
        node = device_nodes[uuid]
        near = free & topology.nodes[node] if node is not None and node in topology.nodes else free
        cores = _pick(topology, near) or _pick(topology, free)
        if cores and len(cores) <= budget:
            reserved[uuid] = tuple(sorted(cores))
            free -= cores
            budget -= len(cores)
    return reserved


def _pick(topology: Topology, candidates: Iterable[int]) -> frozenset[int]:
    """Whole physical cores with at least two logical ones together, or nothing.

    A physical core of which part is outside the cpuset is left out: its other half may work for strangers.
    """
    candidates = frozenset(candidates)
    picked: frozenset[int] = frozenset()
    for group in sorted(topology.groups, key=max, reverse=True):
        if group <= candidates:
            picked |= group
            if len(picked) >= RESERVED_PER_DEVICE:
                return picked
    return frozenset()


def read_topology() -> Topology:
    """This host's cores, as far as this process's cpuset allows them."""
    usable = full_cpuset()
    groups: set[frozenset[int]] = set()
    for core in usable:
        siblings = _read_list(_SYSTEM / f"cpu/cpu{core}/topology/thread_siblings_list")
        groups.add(siblings or frozenset({core}))
    nodes: dict[int, frozenset[int]] = {}
    for directory in (_SYSTEM / "node").glob("node[0-9]*"):
        cores = _read_list(directory / "cpulist")
        if cores:
            nodes[int(directory.name.removeprefix("node"))] = cores & usable
    return Topology(usable, tuple(sorted(groups, key=min)), nodes)


def parse_list(text: str) -> frozenset[int]:
    """The kernel's list form: ``0-3,8`` is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def full_cpuset() -> frozenset[int]:
    """Every core this process's cpuset allows, whatever its threads are pinned to.

    The kernel cuts a wish for all cores down to the cpuset, on every version of cgroups and without any. The
    wish is made for a thread of our own that ends at once.
    """
    found: list[frozenset[int]] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(_MAX_CPU_NUMBER))
        found.append(frozenset(os.sched_getaffinity(0)))

    thread = threading.Thread(target=ask, name="krex-cpuset")
    thread.start()
    thread.join()
    return found[0]


def keep_off(pid: int, reserved: Iterable[int], full: frozenset[int] | None = None) -> Moved:
    """Keep the process's threads, and those they will start, off ``reserved``.

    Only threads whose mask is ``full`` (None: this process's cpuset) are touched. What the process starts
    later inherits the mask. Takes some 10 us per thread, 0.2 ms more for ``full=None``.
    """
    full = full_cpuset() if full is None else full
    return _replace_masks(pid, old=full, new=full - frozenset(reserved))


def restore(pid: int, reserved: Iterable[int], full: frozenset[int] | None = None) -> Moved:
    """Undo `keep_off`, for the threads that still have exactly the mask that it set."""
    full = full_cpuset() if full is None else full
    return _replace_masks(pid, old=full - frozenset(reserved), new=full)


def _replace_masks(pid: int, *, old: frozenset[int], new: frozenset[int]) -> Moved:
    if old == new or not new:
        return Moved()
    changed: list[int] = []
    left_alone: set[int] = set()
    failed: set[int] = set()
    for _ in range(_MAX_PASSES):
        moved_now = 0
        for tid in _threads(pid):
            if tid in failed:
                continue
            try:
                if os.sched_getaffinity(tid) == old:
                    os.sched_setaffinity(tid, new)
                    changed.append(tid)
                    moved_now += 1
                elif tid not in changed:
                    left_alone.add(tid)
            except ProcessLookupError:
                continue
            except OSError:
                failed.add(tid)
        if not moved_now:
            break
    # A thread born with the new mask was never in need of a change, nor was it left alone.
    left_alone = {tid for tid in left_alone if _mask(tid) not in (None, new)}
    return Moved(tuple(changed), tuple(sorted(left_alone)), tuple(sorted(failed)))


@contextlib.contextmanager
def pinned(
    tid: int, cores: Iterable[int], full: frozenset[int] | None = None, reserved: Iterable[int] = ()
) -> Iterator[Pinned]:
    """Pin this process's thread ``tid`` to ``cores`` while inside; never raises, `Pinned.error` says why not.

    A thread counts as free to be pinned if it may run on all of ``full`` (None: this process's cpuset), or on
    all but reserved cores, as `keep_off` leaves it: ``cores``, and ``reserved`` where other devices have some
    too. Any other mask is somebody's choice. At the end the former mask comes back unless the thread's
    mask has been changed meanwhile, and threads born meanwhile with the pinned mask get the former one too.
    """
    outcome = Pinned(frozenset(cores))
    before = _mask(tid)
    full = full_cpuset() if full is None else full
    existed = set(_threads(os.getpid()))
    if not outcome.cores:
        outcome.error = "no cores are reserved"
    elif before is None:
        outcome.error = f"thread {tid} is gone"
    elif before | outcome.cores | frozenset(reserved) != full:
        outcome.error = "the thread's CPU mask was set by somebody else, and is kept"
    else:
        try:
            os.sched_setaffinity(tid, outcome.cores)
            outcome.pinned = True
        except OSError as error:
            outcome.error = f"the kernel did not pin thread {tid}: {error.strerror}"
    try:
        yield outcome
    finally:
        if outcome.pinned and before is not None:
            outcome.threads_born = _unpin(tid, outcome.cores, before, existed)


def _unpin(tid: int, cores: frozenset[int], before: frozenset[int], existed: set[int]) -> tuple[int, ...]:
    """The measuring thread first; then its children, which meanwhile may start pinned ones of their own."""
    _exchange(tid, cores, before)
    born: list[int] = []
    for _ in range(_MAX_PASSES):
        found = [t for t in _threads(os.getpid()) if t not in existed and _mask(t) == cores]
        if not found:
            break
        born.extend(other for other in found if _exchange(other, cores, before))
    return tuple(born)


def _exchange(tid: int, old: frozenset[int], new: frozenset[int]) -> bool:
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(tid) == old:
            os.sched_setaffinity(tid, new)
            return True
    return False


def _mask(tid: int) -> frozenset[int] | None:
    try:
        return frozenset(os.sched_getaffinity(tid))
    except OSError:
        return None


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _read_list(path: Path) -> frozenset[int]:
    try:
        return parse_list(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()
