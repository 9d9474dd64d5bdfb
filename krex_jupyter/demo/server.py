"""A real Jupyter server of the demo's own, and the notebooks' kernels in it, driven as a tuning agent would.

The server has its own runtime, data and configuration directories, its own token and its own coordinator
(``KREX_SOCKET``), so that it meets nobody else's. Kernels are started through sessions (so that a kernel has
its notebook's name) and driven by the kernel websocket.

Ending it has an order: regions are ended and every kernel is seen running before anything is killed, because
a stopped process that loses its parent stays stopped for ever. `JupyterServer.close` can be called from any
state, and again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import websocket

from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo, End, GetStatus, Hello, Status
from krex_jupyter.runtime.client import Connection, next_request_id

RESULT_TYPE: Final = "application/vnd.krex.demo.v1+json"
"""Mime type in which the notebooks show what they measured."""

_START_S = 60.0
_REST_S = 30.0
_JOIN_S = 10.0
_SERVER_END_S = 10.0
_END_S = 3.0


class DemoError(KrexError):
    """The demo cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Outcome:
    """What came of one cell."""

    results: tuple[Any, ...]
    """Payloads of `RESULT_TYPE`, in the order in which they were shown."""
    expressions: dict[str, str] = field(default_factory=dict)
    text: str = ""


def free_port() -> int:
    """A port that was free a moment ago.

    Asked for port 0, older Jupyter servers write 0 down as their own, and cannot be found.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NotebookKernel:
    """One notebook's kernel, over its websocket. Used by one thread at a time."""

    def __init__(self, server: JupyterServer, kernel_id: str, notebook: str) -> None:
        self.kernel_id = kernel_id
        self.notebook = notebook
        self.pid = 0
        self._session = uuid.uuid4().hex
        self._socket: websocket.WebSocket = websocket.create_connection(
            server.url.replace("http://", "ws://", 1)
            + f"api/kernels/{kernel_id}/channels?session_id={self._session}",
            header=[f"Authorization: token {server.token}"],
            timeout=_START_S,
        )

    def ready(self) -> None:
        """Wait until the kernel executes code, and remember its pid."""
        outcome = self.execute("", {"pid": "__import__('os').getpid()"}, timeout_s=_START_S)
        self.pid = int(outcome.expressions["pid"])

    def execute(self, code: str, expressions: dict[str, str] | None = None, *, timeout_s: float) -> Outcome:
        """Run ``code`` and wait for its end.

        Raises:
            DemoError: the code raised, the kernel is gone, or ``timeout_s`` passed.
        """
        message_id = uuid.uuid4().hex
        request = {
            "channel": "shell",
            "header": {
                "msg_id": message_id,
                "msg_type": "execute_request",
                "username": "krex-demo",
                "session": self._session,
                "version": "5.3",
                "date": "",
            },
            "parent_header": {},
            "metadata": {},
            "content": {
                "code": code,
                "silent": False,
                "store_history": False,
                "user_expressions": expressions or {},
                "allow_stdin": False,
                "stop_on_error": True,
            },
            "buffers": [],
        }
        deadline = time.monotonic() + timeout_s
        results: list[Any] = []
        text: list[str] = []
        values: dict[str, str] = {}
        answered = idle = False
        try:
            self._socket.send(json.dumps(request))
            while not (answered and idle):
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                message = json.loads(self._socket.recv())
                if message.get("parent_header", {}).get("msg_id") != message_id:
                    continue
                kind, content = message["msg_type"], message["content"]
                if kind == "stream":
                    text.append(content["text"])
                elif kind in ("display_data", "execute_result"):
                    if RESULT_TYPE in content["data"]:
                        results.append(content["data"][RESULT_TYPE])
                elif kind == "error":
                    raise DemoError(f"{self.notebook}: {content['ename']}: {content['evalue']}")
                elif kind == "execute_reply":
                    answered = True
                    for name, value in content.get("user_expressions", {}).items():
                        values[name] = value.get("data", {}).get("text/plain", "")
                elif kind == "status":
                    idle = content["execution_state"] == "idle"
        except websocket.WebSocketTimeoutException as error:
            raise DemoError(
                f"{self.notebook}: its kernel (pid {self.pid}) did not finish a cell within "
                f"{timeout_s:.0f} s. Output so far: {''.join(text)[-500:]!r}"
            ) from error
        except (websocket.WebSocketException, OSError, json.JSONDecodeError) as error:
            raise DemoError(f"{self.notebook}: its kernel (pid {self.pid}) is gone: {error}") from error
        return Outcome(tuple(results), values, "".join(text))

    def close(self) -> None:
        """Close the websocket: a cell being waited for ends with a `DemoError`."""
        connection = self._socket.sock
        if connection is not None:
            # Closing alone would not wake a thread that waits in recv.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                connection.close()


class JupyterServer:
    """A Jupyter server with our extension, alone with its coordinator in a private directory."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(24)
        self.url = ""
        # A short path: a Unix socket's has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="krex-demo-"))
        self.socket = self.directory / "krex.sock"
        self.coordinator: Connection | None = None
        self._log = self.directory / "server.log"
        self._root = self.directory / "notebooks"
        self._root.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._kernels: list[NotebookKernel] = []
        self._kernel_pidfds: dict[int, int] = {}
        self._service_pidfds: dict[int, int] = {}
        """Coordinator, then guardian: the other way round a new guardian would be started."""
        self._socket_before = os.environ.get("KREX_SOCKET")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """What the coordinator found on this host."""
        return () if self.coordinator is None else self.coordinator.welcome.devices

    def copy_notebooks(self, notebooks: dict[str, Path]) -> None:
        """Copy files into the server's root, under the names given."""
        for name, source in notebooks.items():
            shutil.copyfile(source, self._root / name)

    def open_notebooks(self, names: list[str]) -> list[NotebookKernel]:
        """Start a session with a kernel for each notebook; all kernels start at once."""
        kernels: list[NotebookKernel] = []
        for name in names:
            session = self._request(
                "POST",
                "api/sessions",
                {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}},
            )
            kernel = NotebookKernel(self, session["kernel"]["id"], name)
            self._kernels.append(kernel)
            kernels.append(kernel)
        for kernel in kernels:
            kernel.ready()
            _hold(self._kernel_pidfds, kernel.pid)
        return kernels

    def wait_until_joined(self) -> None:
        """Wait until every kernel is a participant; loading the extension joins in the background.

        Raises:
            DemoError: one is not within 10 s.
        """
        deadline = time.monotonic() + _JOIN_S
        missing = {kernel.pid for kernel in self._kernels}
        while missing and time.monotonic() < deadline:
            missing -= {participant.pid for participant in self.status().participants if participant.joined}
            if missing:
                time.sleep(0.05)
        if missing:
            raise DemoError(
                f"kernels {sorted(missing)} loaded the extension and did not join within {_JOIN_S:.0f} s. "
                f"The server's log ends:\n{self.log_tail()}"
            )

    def status(self) -> Status:
        """The coordinator's snapshot."""
        if self.coordinator is None:
            raise DemoError("the coordinator is not connected yet")
        answer = self.coordinator.ask(GetStatus(request_id=next_request_id()))
        if not isinstance(answer, Status):
            raise DemoError(f"the coordinator answered a status request with {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """End everything: regions, kernels and server, coordinator and guardian; remove the directory."""
        with undisturbed():
            self._end_regions()
            # What the coordinator could not do any more is done here: nothing may be killed while stopped.
            for pidfd in (*self._kernel_pidfds.values(), *self._service_pidfds.values()):
                _signal(pidfd, signal.SIGCONT)
            for kernel in self._kernels:
                kernel.close()
            self._kernels.clear()
            self._end_server()
            if self.coordinator is not None:
                with contextlib.suppress(OSError):
                    self.coordinator.close()
                self.coordinator = None
            for pidfds in (self._kernel_pidfds, self._service_pidfds):
                for pidfd in pidfds.values():
                    _end(pidfd)
                    os.close(pidfd)
                pidfds.clear()
            if self._socket_before is None:
                os.environ.pop("KREX_SOCKET", None)
            else:
                os.environ["KREX_SOCKET"] = self._socket_before
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self) -> None:
        os.environ["KREX_SOCKET"] = str(self.socket)
        environment = dict(os.environ)
        for name in ("CONFIG", "DATA", "RUNTIME"):
            environment[f"JUPYTER_{name}_DIR"] = str(self.directory / name.lower())
        environment["IPYTHONDIR"] = str(self.directory / "ipython")
        for name in ("JUPYTER_TOKEN_FILE", "JUPYTER_PORT", "JPY_PARENT_PID", "JPY_SESSION_NAME"):
            environment.pop(name, None)
        # Not on the command line, which every user of the machine can read.
        environment["JUPYTER_TOKEN"] = self.token
        command = [
            sys.executable,
            "-m",
            "jupyter_server",
            "--no-browser",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={free_port()}",
            "--ServerApp.open_browser=False",
            f"--ServerApp.root_dir={self._root}",
            "--ServerApp.jpserver_extensions={'krex_jupyter': True}",
            # Should this process be killed, the server ends by itself.
            "--ServerApp.shutdown_no_activity_timeout=120",
            "--MappingKernelManager.cull_idle_timeout=120",
            "--MappingKernelManager.cull_interval=30",
        ]
        if os.geteuid() == 0:
            command.append("--allow-root")
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal is for us, and we end the server in order.
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_it_answers(self.directory / "runtime" / f"jpserver-{self._process.pid}.json")
        self.coordinator = Connection.open(Hello(role="viewer", label="krex demo"), timeout_s=10.0)
        self._hold_services(self.coordinator.welcome.coordinator_pid, self.coordinator.welcome.guardian_pid)

    def _wait_until_it_answers(self, where: Path) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                self.url = json.loads(where.read_text(encoding="utf-8"))["url"]
                self._request("GET", "api/status")
            except (OSError, ValueError, urllib.error.URLError):
                time.sleep(0.05)
                continue
            return
        raise DemoError(f"the Jupyter server did not start. Its log ends:\n{self.log_tail()}")

    def log_tail(self, lines: int = 20) -> str:
        """The end of the server's log, for messages."""
        try:
            return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310  the address is the one of our own server
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_REST_S) as answer:  # noqa: S310
            return json.loads(answer.read() or b"null")

    def _hold_services(self, coordinator_pid: int, guardian_pid: int | None) -> None:
        _hold(self._service_pidfds, coordinator_pid)
        if guardian_pid:
            _hold(self._service_pidfds, guardian_pid)

    def _end_regions(self) -> None:
        """End held regions, and requests in the queue first, so that none of them is granted meanwhile."""
        if self.coordinator is None:
            return
        with contextlib.suppress(KrexError, OSError, TimeoutError):
            status = self.status()
            self._hold_services(status.coordinator_pid, status.guardian_pid)
            for region_id in _open_regions(status):
                with contextlib.suppress(KrexError):
                    self.coordinator.ask(End(request_id=next_request_id(), region_id=region_id))

    def _end_server(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_SERVER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM are ignored meanwhile: ending is bounded, and must not be cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hold(pidfds: dict[int, int], pid: int) -> None:
    if pid not in pidfds:
        with contextlib.suppress(ProcessLookupError):
            pidfds[pid] = os.pidfd_open(pid)


def _signal(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _end(pidfd: int) -> None:
    """End a process, which may be gone already: asked first, then killed."""
    for number, wait_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        _signal(pidfd, number)
        _signal(pidfd, signal.SIGCONT)
        if select.select([pidfd], [], [], wait_s)[0]:
            return


def _open_regions(status: Status) -> Iterator[str]:
    for device in status.devices:
        for waiter in reversed(device.queue):
            yield waiter.region_id
        if device.holder is not None:
            yield device.holder.region_id
