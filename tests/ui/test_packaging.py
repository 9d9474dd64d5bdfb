"""What wheels contain: the panel where it was or can be built, everything else in any case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatch_jupyter_builder", reason="needs the extra: pip install 'krex-jupyter[ui]'")

from tests.scripts import ROOT

from .conftest import absent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PANEL = "share/jupyter/labextensions/krex-jupyter/"


def clone(directory: Path) -> Path:
    """A copy of what is under version control or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


def wheel(source: Path, directory: Path, *, path: str) -> list[str]:
    """Names in the wheel that pip makes of a clone; no network is needed."""
    made = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", "--no-index", "--wheel-dir", str(directory), str(source)),
        ],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (file,) = directory.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_a_wheel_made_without_node_has_everything_but_the_panel(tmp_path: Path) -> None:
    empty = tmp_path / "no-programs"
    empty.mkdir()
    names = wheel(clone(tmp_path / "clone"), tmp_path / "wheels", path=str(empty))
    assert "krex_jupyter/magics.py" in names
    assert any(name.endswith("etc/jupyter/jupyter_server_config.d/krex_jupyter.json") for name in names)
    assert not any("labextensions" in name for name in names)
    assert not any("node_modules" in name or name.endswith(".ts") for name in names)


def test_a_wheel_of_a_clone_with_a_built_panel_contains_it(tmp_path: Path) -> None:
    built = ROOT / "krex_jupyter" / "labextension"
    if not (built / "package.json").exists():
        absent("the panel is not built: run make ui")
    source = clone(tmp_path / "clone")
    shutil.copytree(built, source / "krex_jupyter" / "labextension")
    names = wheel(source, tmp_path / "wheels", path=os.environ["PATH"])
    panel = [name.split(PANEL)[1] for name in names if PANEL in name]
    assert {"package.json", "install.json", "schemas/krex-jupyter/panel.json"} <= set(panel)
    assert any(name.startswith("static/remoteEntry.") for name in panel)
