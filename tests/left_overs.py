"""What a run left behind: found by what every process of it has in its command line or environment."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def processes_that_mention(text: str) -> dict[int, str]:
    """Pid and command line of every process with ``text`` in its command line or environment."""
    found: dict[int, str] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            command = (directory / "cmdline").read_bytes()
            if text.encode() in command + (directory / "environ").read_bytes():
                found[int(directory.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found
