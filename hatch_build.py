"""Builds the panel for JupyterLab and Notebook 7 where Node.js is at hand, and lets the installation go on where not.

Called by the build hook of pyproject.toml. Wheels made where Node.js exists contain the panel; without it
everything but the panel works, and the server extension says that the panel is missing. An editable installation
takes what `make ui` built, and never builds: it is made often, and the first build takes a minute.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from hatch_jupyter_builder import npm_builder

SOURCES = Path("labextension")
BUILT = Path("krex_jupyter/labextension/package.json")


def build_panel(target_name: str, version: str, **options: str) -> None:
    """The build function: ``target_name`` is wheel or sdist, ``version`` standard or editable."""
    log = logging.getLogger(__name__)
    if version == "editable":
        return
    if shutil.which("node") is None:
        log.warning(
            "Node.js was not found: this build has no JupyterLab panel. Install Node.js 20 to have it."
        )
        return
    npm_builder(target_name, version, path=str(SOURCES), **options)
