"""Whether the JupyterLab and Notebook 7 side of this package is installed, and what to do where it is not.

An installation from source without Node.js has everything but the panel. That must not look like a defect of
Jupyter: the server says it in its log.
"""

from __future__ import annotations

from pathlib import Path

from jupyter_core.paths import jupyter_path

NAME = "krex-jupyter"


def panel_problem(search_path: list[str] | None = None) -> str:
    """What is wrong with the panel's installation; empty where a front end can find it.

    ``search_path``: Jupyter's data directories; None: those of this process.
    """
    directories = jupyter_path() if search_path is None else search_path
    if any((Path(path) / "labextensions" / NAME / "package.json").exists() for path in directories):
        return ""
    return (
        "The KREX panel for JupyterLab and Notebook 7 is not installed: this package was installed from source without "
        "Node.js. Everything else works (%krex status, krex status). To have the panel, install Node.js 20 and install "
        "again, or install a wheel."
    )
