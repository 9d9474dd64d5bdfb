"""The oldest versions of the base dependencies that pyproject.toml allows, as pip requirements, one line.

pip install -e ".[test]" $(python benchmarks/floors.py)
"""

from __future__ import annotations

import tomllib
from pathlib import Path


def floors() -> list[str]:
    """``name==floor`` of every base dependency; each must state one."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    pinned: list[str] = []
    for requirement in project["dependencies"]:
        name, separator, floor = requirement.partition(">=")
        if not separator:
            raise SystemExit(f"{requirement!r} states no floor; write it as name>=version")
        pinned.append(f"{name.strip()}=={floor.strip()}")
    return pinned


if __name__ == "__main__":
    print(" ".join(floors()))
