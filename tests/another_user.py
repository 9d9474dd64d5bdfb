"""Running a piece of a test as a user without rights: what root may do anyway proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

UID = 20_000 + os.getpid() % 40_000
"""Likely nobody's, and another one in every run, so that runs side by side do not meet."""
PATIENCE_S = 60.0


def run_as_another_user(
    script: str, *arguments: object, loaded: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """What ``script`` prints, run as `UID` where this is root, else as whoever this is.

    ``loaded`` is run before the change: where the modules lie, the other user may not be let in.
    """
    changed = f"import os; os.setgroups([]); os.setgid({UID}); os.setuid({UID})" if os.getuid() == 0 else ""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(("import sys", loaded, changed, script)), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def other_uid() -> int:
    """The uid that `run_as_another_user` runs with."""
    return UID if os.getuid() == 0 else os.getuid()


@contextmanager
def reachable_directory() -> Iterator[Path]:
    """A temporary directory that another user may enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="krex-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
