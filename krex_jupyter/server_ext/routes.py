"""REST and WebSocket under ``krex/api``: translates requests to coordinator messages and answers to JSON.

Nothing is decided here. Authentication, authorisation, cross-site checks are the server's own. Bodies are the
structs of `protocol.py` as JSON; an error is an `ErrorBody`, and 503 with ``Retry-After``
where no coordinator answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web, websocket

from krex_jupyter.errors import CoordinatorUnavailable
from krex_jupyter.protocol import (
    End,
    ErrorBody,
    GetHistory,
    GetReport,
    GetStatus,
    HolderStatus,
    RegionReport,
    Status,
    Unavailable,
    WaiterStatus,
)

from .changes import ChangeQueue
from .connection import Refused

AUTH_RESOURCE = "krex"
RETRY_AFTER_S = 5
MOST_REPORTS = 1000

_HTTP_STATUS = {
    "bad_request": 400,
    "cancelled": 409,
    "device_not_found": 404,
    "ended": 409,
    "not_exclusive": 409,
    "not_found": 404,
    "not_permitted": 403,
    "other_coordinator": 409,
    "unsupported": 501,
    "wait_timeout": 504,
}
_WHAT_TO_DO = {
    "bad_request": "Correct the request; the message says what is wrong with it.",
    "not_found": "See krex/api/status for regions that are held or queued, krex/api/history for those that ended.",
    "not_permitted": "Only the owner's user, or root, may end a region. Ask them, or wait for its time limit.",
}


class Problem(Exception):
    """An error response."""

    def __init__(self, status: int, code: str, message: str, what_to_do: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.what_to_do = what_to_do


class KrexHandler(APIHandler):
    """Base of the REST handlers."""

    auth_resource = AUTH_RESOURCE
    # A view that polls is nobody's activity; regions are, and are counted where they happen.
    _track_activity = False

    def initialize(self, extension: Any) -> None:
        """Keep the extension, whose link answers everything."""
        self.extension = extension

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """JSON, with what to do about it."""
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        if not isinstance(error, Problem):
            super().write_error(status_code, **kwargs)
            return
        self.set_status(error.status)
        self.clear_header("Content-Length")
        if error.status == 503:
            self.set_header("Retry-After", str(RETRY_AFTER_S))
        body = ErrorBody(message=error.message, what_to_do=error.what_to_do, code=error.code)
        self.finish(msgspec.json.encode(body))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """A `Problem` is an answer, not a defect to be logged with a traceback."""
        if not isinstance(value, Problem):
            super().log_exception(typ, value, tb)

    async def ask(self, message: Any) -> Any:
        """The coordinator's answer; raises `Problem`."""
        try:
            return await self.extension.ask(message)
        except Refused as refused:
            raise Problem(
                _HTTP_STATUS.get(refused.code, 400),
                refused.code,
                str(refused),
                _WHAT_TO_DO.get(refused.code, "The message says what happened."),
            ) from refused
        except CoordinatorUnavailable as error:
            raise Problem(
                503,
                "no_coordinator",
                str(error),
                f"This server goes on trying; ask again in {RETRY_AFTER_S} s. The server's log has the details.",
            ) from error

    async def ask_status(self) -> Status:
        """A fresh snapshot, with this server's own notices; raises `Problem`."""
        status: Status = await self.ask(GetStatus(request_id=self.extension.next_request_id()))
        with_notices: Status = self.extension.with_notices(status)
        return with_notices

    def reply(self, value: Any) -> None:
        """Answer with a struct, or a list of them."""
        self.finish(msgspec.json.encode(value))

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number from the query; raises `Problem` where it is none or out of range."""
        text = self.get_query_argument(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise Problem(
                400,
                "bad_request",
                f"The parameter {name} is {text!r}; allowed are numbers from {least:g} to {most:g}.",
                _WHAT_TO_DO["bad_request"],
            )
        return value


class StatusHandler(KrexHandler):
    """``GET krex/api/status``: who holds what, who waits, who is known (`Status`)."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with a `Status`."""
        self.reply(await self.ask_status())


class DevicesHandler(KrexHandler):
    """``GET krex/api/devices``: the devices of this host (a list of `DeviceInfo`)."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the devices."""
        self.reply([entry.device for entry in (await self.ask_status()).devices])


class HistoryHandler(KrexHandler):
    """``GET krex/api/history?limit=&device=&label=&verdict=&since=``: reports, newest first (`History`)."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with a `History`."""
        request = GetHistory(
            request_id=self.extension.next_request_id(),
            limit=int(self.number("limit", 100, 1, MOST_REPORTS)),
            device=self.get_query_argument("device", ""),
            label=self.get_query_argument("label", ""),
            verdict=self.get_query_argument("verdict", ""),
            since=self.number("since", 0.0, 0.0, 1e12),
        )
        self.reply(await self.ask(request))


class RegionHandler(KrexHandler):
    """``GET`` and ``DELETE krex/api/regions/{id}``: one region, by the id that its queue entry already has."""

    @web.authenticated
    @authorized
    async def get(self, region_id: str) -> None:
        """Answer with its `RegionReport`, or with its `HolderStatus` or `WaiterStatus` before it has ended."""
        current = find_region(await self.ask_status(), region_id)
        if current is not None:
            self.reply(current)
            return
        history = await self.ask(GetReport(request_id=self.extension.next_request_id(), region_id=region_id))
        if not history.reports:
            raise Problem(404, "not_found", f"No region has the id {region_id!r}.", _WHAT_TO_DO["not_found"])
        self.reply(history.reports[0])

    @web.authenticated
    @authorized
    async def delete(self, region_id: str) -> None:
        """End the region, or leave the queue."""
        await self.ask(End(request_id=self.extension.next_request_id(), region_id=region_id))
        self.set_status(204)
        self.finish()


class EventsSocket(WebSocketMixin, websocket.WebSocketHandler, JupyterHandler):
    """``GET krex/api/events``: a `Status`, then an `Event` per change, or `Unavailable` while nobody coordinates."""

    auth_resource = AUTH_RESOURCE

    def initialize(self, extension: Any) -> None:
        """Keep the extension, which feeds this socket."""
        self.extension = extension
        self._queue: ChangeQueue | None = None
        self._pump: asyncio.Task[None] | None = None

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Open the socket for whoever may read."""
        if not await ensure_async(
            self.authorizer.is_authorized(self, self.current_user, "read", AUTH_RESOURCE)
        ):
            raise web.HTTPError(403)
        opened = super().get(*args, **kwargs)
        if opened is not None:
            await opened

    def open(self, *args: Any, **kwargs: Any) -> None:
        """Begin to send."""
        super().open(*args, **kwargs)
        self._queue = self.extension.new_queue()
        self._pump = asyncio.get_running_loop().create_task(
            self._send_changes(self._queue), name="krex-browser"
        )

    def on_message(self, message: str | bytes) -> None:
        """Nothing is expected from the browser."""

    def on_close(self) -> None:
        """Stop sending."""
        if self._queue is not None:
            self.extension.drop_queue(self._queue)
        if self._pump is not None:
            self._pump.cancel()

    async def _send_changes(self, queue: ChangeQueue) -> None:
        try:
            while True:
                # Awaiting the write is what makes a slow browser fill its own queue and nothing else.
                await self.write_message(msgspec.json.encode(await queue.pop()).decode())
        except websocket.WebSocketClosedError:
            return


def find_region(status: Status, region_id: str) -> HolderStatus | WaiterStatus | RegionReport | None:
    """A region in a snapshot: held, queued, or among the recent reports."""
    for device in status.devices:
        if device.holder is not None and device.holder.region_id == region_id:
            return device.holder
        for waiter in device.queue:
            if waiter.region_id == region_id:
                return waiter
    return next((report for report in status.recent if report.region_id == region_id), None)


def unavailable(detail: str) -> Unavailable:
    """What a browser gets first while nobody coordinates."""
    return Unavailable(at=time.time(), detail=detail)


def handlers(extension: Any) -> list[tuple[str, type[web.RequestHandler], dict[str, Any]]]:
    """The routes, relative to the server's base URL."""
    keep = {"extension": extension}
    return [
        (r"krex/api/status", StatusHandler, keep),
        (r"krex/api/devices", DevicesHandler, keep),
        (r"krex/api/history", HistoryHandler, keep),
        (r"krex/api/regions/([^/]+)", RegionHandler, keep),
        (r"krex/api/events", EventsSocket, keep),
    ]
