"""Real interactive shells on terminals of their own, for tests of what happens to a job and its shell."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

from krex_jupyter.enforcement.processes import all_pids
from tests.scripts import search_path


class Terminal:
    """A real interactive shell on a terminal of its own."""

    def __init__(self) -> None:
        self.master, slave = os.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        self.shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "PYTHONPATH": search_path(), "PS1": "", "HISTFILE": "", "LC_ALL": "C"},
        )
        os.close(slave)
        self.shown = ""

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def read_until(self, text: str, within_s: float = 20.0) -> None:
        """Wait until ``text`` is shown."""
        give_up_s = time.monotonic() + within_s
        while text not in self.shown:
            left_s = give_up_s - time.monotonic()
            assert left_s > 0, f"{text!r} was not shown within {within_s:g} s: {self.shown!r}"
            if select.select([self.master], [], [], left_s)[0]:
                self.shown += os.read(self.master, 4096).decode(errors="replace").replace("\r\n", "\n")

    def run(self, code: Path, *arguments: str) -> int:
        """Run a script in the foreground; returns its pid, which it shows itself as "joined as PID ready"."""
        self.type(shlex.join([sys.executable, str(code), *arguments]))
        self.read_until("joined as ")
        self.read_until("ready\n")
        return int(self.shown.partition("joined as ")[2].split()[0])

    def start_shell(self) -> None:
        """Run another shell in the foreground, which then reads what is typed."""
        self.type("bash --norc --noprofile --noediting -i")

    @property
    def foreground_group(self) -> int:
        return os.tcgetpgrp(self.master)

    def end(self) -> None:
        """Continue and kill what runs on it, its shell last."""
        jobs = [pid for pid in all_pids() if pid != self.shell.pid and _session(pid) == self.shell.pid]
        for pid in (*jobs, self.shell.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        os.close(self.master)
        self.shell.wait(10)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
