"""`Monitor`: who measures, who waits and what came of it, live in a notebook.

A widget that only displays: a click would be handled after the running cell, so there is nothing to click. It
has a thread and a connection of its own (as a viewer: it is never gated and starts no coordinator), because a
running cell keeps the kernel's own loop from doing anything. Three limits keep it from disturbing what it
shows: nothing is drawn unless something changed, at most four times a second, and not while this very process
holds a region, whose Python it would interrupt. The thread sleeps in ``select`` without a time-out as long as
nothing is due.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from html import escape
from typing import Any

import ipywidgets
import msgspec

from .display import UPDATE_INTERVAL_S, monitor_html
from .errors import KrexError
from .protocol import Event, Hello, RegionReport, Status, Subscribe
from .runtime.client import Connection, next_request_id

RETRY_INTERVAL_S = 1.0
"""How often a lost coordinator is looked for: a connect call to a socket, nothing more."""
_OPEN_TIMEOUT_S = 1.0


class Monitor(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets is untyped
    """Devices with holder and queue, and the last verdicts; `close` ends it, as does the kernel's end."""

    def __init__(self, **layout: Any) -> None:
        self._text = ipywidgets.HTML(value="<div>KREX: connecting …</div>")
        super().__init__([self._text], **layout)
        self._follower = _Follower(self._text)
        self._follower.start()

    def close(self) -> None:
        """Take the widget away and end its thread; returns once that has ended, within about a second."""
        follower = getattr(self, "_follower", None)
        if follower is not None:
            follower.stop()
        super().close()


class Pace:
    """When to draw: something changed, the last drawing is long enough ago, and no region of ours is held.

    Time is passed in, so that the rule can be tested without waiting.
    """

    def __init__(self, interval_s: float = UPDATE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._next_s = float("-inf")
        self._changed = False
        self.measuring = False
        """This process holds a region: everything waits."""

    def change(self) -> None:
        """There is something new to draw."""
        self._changed = True

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until drawing is due, 0 for now; None while there is nothing to draw."""
        if not self._changed or self.measuring:
            return None
        return max(0.0, self._next_s - now_s)

    def drawn(self, now_s: float) -> None:
        """It was drawn."""
        self._changed = False
        self._next_s = now_s + self._interval_s


class _Follower:
    """The thread behind a `Monitor`: follows the coordinator, and draws."""

    def __init__(self, text: ipywidgets.HTML) -> None:
        self._text = text
        self._stopping = threading.Event()
        self._woken, self._waking = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="krex-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; any number of times, from any other thread."""
        if self._waking.fileno() < 0:
            return
        self._stopping.set()
        self._waking.send(b"x")
        self._thread.join()
        # Not closed by the thread: it may end between the two lines that wake it.
        self._woken.close()
        self._waking.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = Connection.open(Hello(role="viewer"), start=False, timeout_s=_OPEN_TIMEOUT_S)
            except (KrexError, OSError) as error:
                self._draw(_absent_html(error))
                self._stopping.wait(RETRY_INTERVAL_S)
                continue
            with contextlib.closing(connection):
                try:
                    self._follow(connection)
                except (KrexError, OSError):
                    # It went away in mid-sentence; opening it again says why, if it stays away.
                    continue

    def _follow(self, connection: Connection) -> None:
        """Draw what the coordinator tells until one of the two ends."""
        pace = Pace()
        status: Status | None = None
        received_at = 0.0
        # Snapshots that come with changes are light: verdicts arrive one by one, with the end of each region.
        recent: tuple[RegionReport, ...] = ()
        connection.send(Subscribe(request_id=next_request_id()))
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(pace.due_in_s(time.monotonic()))]
                if self._stopping.is_set():
                    return
                if connection in ready:
                    message = connection.receive_now()
                    if isinstance(message, Event) and message.report is not None:
                        recent = (message.report, *recent)[:_RECENT]
                    fresh = message.status if isinstance(message, Event) else message
                    if isinstance(fresh, Status):
                        status, received_at = fresh, time.time()
                        recent = fresh.recent[:_RECENT] or recent
                        pace.measuring = _holds(fresh)
                        pace.change()
                    elif isinstance(message, Event) and message.pid == os.getpid():
                        pace.measuring = _MEASURING.get(message.kind, pace.measuring)
                elif status is not None and pace.due_in_s(time.monotonic()) == 0:
                    self._draw(monitor_html(msgspec.structs.replace(status, recent=recent), received_at))
                    pace.drawn(time.monotonic())

    def _draw(self, html: str) -> None:
        if self._text.value != html:
            self._text.value = html


_RECENT = 5
_MEASURING = {"granted": True, "released": False, "revoked": False, "left": False}


def _holds(status: Status) -> bool:
    return any(
        device.holder is not None and device.holder.pid == os.getpid() and device.holder.phase != "leaving"
        for device in status.devices
    )


def _absent_html(error: Exception) -> str:
    return (
        "<div><b>▲ KREX: no coordinator</b><br>"
        f"{escape(' '.join(str(error).split()))}<br>"
        "The first region starts one: run <code>%%krex_exclusive</code> in a cell, or <code>krex serve</code>"
        " in a terminal. This view goes on by itself.</div>"
    )
