"""Stopping and continuing processes, and proving that they stand still.

A stop signal is only a request: a leader in state T with another thread still running was seen in most trials,
for up to 40 ms. So `freeze` waits until *every* thread of every process is stopped, looks for children that were
born meanwhile, and goes on until nothing new turns up.

Everything is sent through pidfds, never through pids. This module does not decide whom to stop (`plan.py`) and
does not write the journal: the caller passes `announce`, which is called with the processes about to be stopped
and must not return before they are written down.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from krex_jupyter.identity import read_stat

from .processes import ProcessHandle

Announce = Callable[[list[ProcessHandle]], None]

_FIRST_WAIT_S = 0.0002
_LONGEST_WAIT_S = 0.002


@dataclass(slots=True)
class Frozen:
    """What `freeze` achieved."""

    stopped: list[ProcessHandle] = field(default_factory=list)
    """Stand still, every thread seen stopped."""
    refused: list[tuple[ProcessHandle, str]] = field(default_factory=list)
    """Were continued again, and why."""
    verify_s: float = 0.0


def freeze(
    wanted: Iterable[ProcessHandle],
    *,
    first: Iterable[ProcessHandle] = (),
    announce: Announce,
    newborn: Callable[[list[ProcessHandle]], list[ProcessHandle]],
    freeze_s: float,
    verify_s: float,
    beat: Callable[[], None] = lambda: None,
) -> Frozen:
    """Stop ``wanted`` and everything that they bear meanwhile; returns once that is proved or refused.

    Args:
        wanted: in the order in which they are to be stopped.
        first: those that must be seen standing, one after the other, before any of ``wanted`` is asked to stop. A
            shell whose job stops before it does itself takes the terminal back, and it may do so between its
            signal and its stop.
        announce: writes down what is about to be stopped.
        newborn: given processes that stand still, returns those of their children that are to be stopped too
            and are not known yet.
        freeze_s: bound for the whole search for a fixpoint.
        verify_s: bound for one generation to be seen standing.
        beat: called while waiting, so that the caller can show that it lives.

    Blocks for at most ``freeze_s``, and ``verify_s`` for each of ``first`` and once more.
    """
    result = Frozen()
    give_up_s = time.monotonic() + freeze_s
    later = [*([handle] for handle in first), list(wanted)]
    generation: list[ProcessHandle] = []
    while generation or later:
        if not generation:
            generation = later.pop(0)
            continue
        announce(generation)
        for handle in list(generation):
            try:
                stop(handle)
            except PermissionError as error:
                generation.remove(handle)
                result.refused.append((handle, f"it may not be stopped ({error.strerror})"))
        started_s = time.monotonic()
        running = wait_stopped(generation, verify_s, beat)
        result.verify_s += time.monotonic() - started_s
        for handle in running:
            resume(handle)
            result.refused.append((handle, f"it did not stop within {verify_s:g} s"))
        stopped = [handle for handle in generation if handle not in running]
        result.stopped += stopped
        generation = newborn(stopped)
        if generation and time.monotonic() > give_up_s:
            result.refused += [
                (handle, f"its family still grew after {freeze_s:g} s of stopping it")
                for handle in generation
            ]
            break
    return result


def stop(handle: ProcessHandle) -> None:
    """Send the stop signal; a process that is gone needs none."""
    _send(handle, signal.SIGSTOP)


def resume(handle: ProcessHandle) -> None:
    """Send the continue signal; a process that is gone needs none."""
    _send(handle, signal.SIGCONT)


def wait_stopped(
    handles: Iterable[ProcessHandle], bound_s: float, beat: Callable[[], None] = lambda: None
) -> list[ProcessHandle]:
    """Wait until every thread of ``handles`` stands; returns those that did not within ``bound_s``."""
    return _wait(handles, lambda handle: not handle.running_threads(), bound_s, beat)


def wait_running(handles: Iterable[ProcessHandle], bound_s: float) -> list[ProcessHandle]:
    """Wait until no leader of ``handles`` is stopped; returns those that still were after ``bound_s``."""

    def runs(handle: ProcessHandle) -> bool:
        stat = read_stat(handle.pid)
        return stat is None or not stat.stopped

    return _wait(handles, runs, bound_s, lambda: None)


def _wait(
    handles: Iterable[ProcessHandle],
    arrived: Callable[[ProcessHandle], bool],
    bound_s: float,
    beat: Callable[[], None],
) -> list[ProcessHandle]:
    pending = [handle for handle in handles if not arrived(handle)]
    give_up_s = time.monotonic() + bound_s
    pause_s = _FIRST_WAIT_S
    while pending and time.monotonic() < give_up_s:
        # There is no event for "stopped" of a process that is not a child: only looking again remains.
        time.sleep(pause_s)
        beat()
        pause_s = min(pause_s * 2, _LONGEST_WAIT_S)
        pending = [handle for handle in pending if not arrived(handle)]
    return pending


def _send(handle: ProcessHandle, number: signal.Signals) -> None:
    if handle.pidfd >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle.pidfd, number)
