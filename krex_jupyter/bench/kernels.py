"""Real ipykernels for benchmarks: started without a server, driven by code, and ended in order.

A kernel started here ends with the process that started it (``JPY_PARENT_PID``), and is continued before it
is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from jupyter_client.blocking.client import BlockingKernelClient

from krex_jupyter.errors import KrexError

_START_S = 60.0
_END_S = 3.0


class KernelError(KrexError):
    """A benchmark's kernel did not start, or its code failed."""


class Kernel:
    """One ipykernel. Start it with `Kernel.start`, wait with `ready`, end it with `close` (or ``with``)."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection_file: Path, client: BlockingKernelClient
    ) -> None:
        self._process = process
        self._connection_file = connection_file
        self._client = client

    @classmethod
    def start(cls, directory: Path, name: str, environment: Mapping[str, str]) -> Kernel:
        """Start a kernel of this interpreter; it writes its connection file into ``directory``."""
        connection_file = directory / f"kernel-{name}.json"
        given = {**environment, "JPY_PARENT_PID": str(os.getpid()), "IPYTHONDIR": str(directory / "ipython")}
        with (directory / f"kernel-{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ipykernel_launcher", "-f", str(connection_file)],
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, connection_file, BlockingKernelClient(connection_file=str(connection_file)))

    @property
    def pid(self) -> int:
        """Of the kernel's process."""
        return self._process.pid

    def ready(self) -> None:
        """Wait until it answers.

        Raises:
            KernelError: it did not within a minute.
        """
        deadline = time.monotonic() + _START_S
        while not _complete(self._connection_file):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise KernelError(
                    f"kernel {self.pid} did not start: see {self._connection_file.with_suffix('.log')}"
                )
            time.sleep(0.02)
        self._client.load_connection_file()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=deadline - time.monotonic())

    def run(self, code: str, timeout_s: float = 60.0) -> str:
        """Execute ``code``, wait for its end and return what it printed.

        Raises:
            KernelError: it raised, or took longer than ``timeout_s``.
        """
        printed: list[str] = []

        def collect(message: dict[str, object]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and isinstance(content, dict):
                printed.append(str(content["text"]))

        try:
            reply = self._client.execute_interactive(
                code, timeout=timeout_s, allow_stdin=False, output_hook=collect
            )
        except TimeoutError as error:
            raise KernelError(
                f"kernel {self.pid} did not finish within {timeout_s:.0f} s: {code!r}"
            ) from error
        if reply["content"]["status"] != "ok":
            raise KernelError(
                f"kernel {self.pid}: {reply['content'].get('ename')}: {reply['content'].get('evalue')}"
            )
        return "".join(printed)

    def begin(self, code: str) -> None:
        """Execute ``code`` and do not wait for it."""
        self._client.execute(code)

    def interrupt(self) -> None:
        """As the stop button does."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End it, whatever it is doing, and reap it."""
        self._client.stop_channels()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            # A stopped process would keep SIGTERM pending for ever.
            self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _complete(connection_file: Path) -> bool:
    """Whether the kernel has written its whole connection file."""
    try:
        return "key" in json.loads(connection_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
