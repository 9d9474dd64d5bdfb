"""Which kernels this server has, who their processes are, and which notebook they belong to.

Every kernel that runs as a child of this server is registered with the coordinator, whether or not it ever
loads KREX. The provisioner reports its kernels at launch; kernels of other provisioners are found through the
server's ``kernel_actions`` events, and a slow round over all kernels catches what neither told and follows
notebooks that are renamed. A kernel elsewhere (a gateway, a container, another host) has a pid that means
nothing here, or somebody else: only a child of this very process is ever registered.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from jupyter_core.utils import ensure_async

from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import Ungate

from .connection import KernelRecord, Link
from .processes import Process

ACTIONS_SCHEMA = "https://events.jupyter.org/jupyter_server/kernel_actions/v1"


class Kernels:
    """The kernels of one server."""

    def __init__(
        self,
        *,
        link: Link,
        kernel_manager: Any,
        session_manager: Any,
        root_dir: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
        round_s: float,
    ) -> None:
        self._link = link
        self._kernel_manager = kernel_manager
        self._session_manager = session_manager
        self._root_dir = root_dir
        self._log = log
        self._round_s = round_s
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._look_for_ever(), name="krex-kernels")

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def on_action(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        """Listener for the server's ``kernel_actions`` events."""
        if data.get("status") != "success":
            return
        if data.get("action") in {"start", "restart"}:
            self._wanted.set()
        elif data.get("action") == "interrupt":
            await self._thaw(str(data.get("kernel_id", "")))

    async def _thaw(self, kernel_id: str) -> None:
        """Thaw a kernel that was sent an interrupt: by a message, or by a provisioner other than ours."""
        record = self._link.kernels.get(kernel_id)
        if record is None or not self._link.connected:
            return
        request = Ungate(request_id=self._link.next_request_id(), pid=record.process.pid)
        try:
            await self._link.ask(request)
        except KrexError as error:
            self._log.debug("KREX did not thaw kernel %s: %s", kernel_id, error)

    async def _look_for_ever(self) -> None:
        while True:
            self._wanted.clear()
            try:
                await self.register_all()
            except Exception as error:  # noqa: BLE001 - kernel and session managers are replaceable, and raise anything
                self._log.warning("KREX could not go over the kernels of this server: %r", error)
            try:
                async with asyncio.timeout(self._round_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def register_all(self) -> None:
        """Register every local kernel, with the notebook its session names now."""
        notebooks = await self._notebooks()
        registered = self._link.kernels
        for kernel_id in self._kernel_manager.list_kernel_ids():
            known = registered.get(kernel_id)
            manager = self._kernel_manager.get_kernel(kernel_id)
            process = local_process(manager)
            if process is None:
                continue
            notebook = notebooks.get(kernel_id) or (known.notebook if known is not None else "")
            if not notebook:
                # A kernel runs before its session is saved.
                notebook = notebook_path(process.environment("JPY_SESSION_NAME"), self._root_dir)
            self._link.register(
                KernelRecord(
                    kernel_id=kernel_id,
                    process=process,
                    label=label_for(notebook, getattr(manager, "kernel_name", "")),
                    notebook=notebook,
                )
            )

    async def _notebooks(self) -> dict[str, str]:
        """Notebook paths by kernel id; kernels without a session are missing."""
        sessions = await ensure_async(self._session_manager.list_sessions())
        found: dict[str, str] = {}
        for session in sessions or ():
            kernel_id = (session.get("kernel") or {}).get("id", "")
            if kernel_id and session.get("path"):
                found[kernel_id] = notebook_path(str(session["path"]), self._root_dir)
        return found


def local_process(manager: Any) -> Process | None:
    """The kernel process of a kernel manager if it is a living child of this process, by pidfd; else None."""
    pid = getattr(getattr(manager, "provisioner", None), "pid", None)
    if not isinstance(pid, int) or pid <= 0:
        return None
    process = Process.open(pid)
    # A child stays a zombie until it is reaped, so a pid whose parent is this process cannot be somebody else's.
    if process is not None and process.parent_pid != os.getpid():
        process.close()
        return None
    return process


def notebook_path(session_name: str, root_dir: str) -> str:
    """The path that a user knows: relative to the server's root where it lies inside."""
    root = Path(root_dir).expanduser().absolute() if root_dir else None
    path = Path(session_name)
    if root is not None and path.is_absolute() and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return session_name


def label_for(notebook: str, kernel_name: str) -> str:
    """What to call a kernel in a queue: its notebook's name, else its kernel spec's."""
    return Path(notebook).stem if notebook else kernel_name
