"""What a reader of a result needs to know about the machine it comes from."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from krex_jupyter import __version__


def machine() -> dict[str, Any]:
    """What a reader needs to know about where the numbers come from."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "krex_jupyter": __version__,
        "load_average": list(os.getloadavg()),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
