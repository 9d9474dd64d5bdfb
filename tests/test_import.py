"""Importing the package: light, and possible everywhere, because every kernel and server of a machine does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import krex_jupyter
from krex_jupyter import errors

ROOT = Path(krex_jupyter.__file__).parent.parent
HEAVY = {
    "torch",
    "jax",
    "cupy",
    "numba",
    "numpy",
    "cuda",
    "pynvml",
    "amdsmi",
    "ctypes",
    "sqlite3",
    "asyncio",
    "multiprocessing",
    "concurrent.futures",
    "jupyter_server",
    "jupyter_client",
    "tornado",
    "zmq",
    "ipykernel",
    "ipywidgets",
    "IPython",
    "traitlets",
    "psutil",
    "msgspec",
    "filelock",
}
ALLOWED_S = 0.05
ATTEMPTS = 7
PATIENCE_S = 60.0


def in_a_fresh_interpreter(script: str, *options: str) -> str:
    """What ``script`` prints."""
    done = subprocess.run(
        [sys.executable, *options, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    loaded = json.loads(
        in_a_fresh_interpreter(
            "import json, sys; before = set(sys.modules); import krex_jupyter\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
    )
    assert "krex_jupyter" in loaded
    assert [name for name in loaded if name in HEAVY] == []
    assert [name for name in loaded if name.startswith("krex_jupyter.")] == []


def test_the_errors_and_the_places_need_no_dependency_at_all() -> None:
    """Isolated from site-packages."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import krex_jupyter, krex_jupyter.locate\n"
    in_a_fresh_interpreter(script + "krex_jupyter.KrexError, krex_jupyter.WaitTimeout", "-I", "-S")


def test_importing_after_ipython_takes_less_than_50_ms() -> None:
    """Best of several, because whatever else runs here only ever adds."""
    script = (
        "import IPython, time; before_s = time.perf_counter(); import krex_jupyter\n"
        "print(time.perf_counter() - before_s)"
    )
    assert min(float(in_a_fresh_interpreter(script)) for _ in range(ATTEMPTS)) < ALLOWED_S


ELSEWHERE = """
import asyncio, filelock, ipywidgets, msgspec, sys  # what others wrote would look for that platform's parts
sys.platform = {platform!r}
for name in {missing!r}:
    sys.modules[name] = None  # as where the module does not exist
import krex_jupyter as krex
assert krex.__version__
for name in krex.__all__:
    try:
        getattr(krex, name)
    except krex.UnsupportedPlatform:
        pass
    except ModuleNotFoundError as error:
        assert error.name.startswith("krex_jupyter."), error
try:
    with krex.exclusive("cpu"):
        raise SystemExit("a region was granted")
except krex.UnsupportedPlatform as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("platform", "missing"),
    [("darwin", ()), ("win32", ("fcntl", "resource", "termios", "pwd", "grp", "pty"))],
)
def test_elsewhere_than_on_linux_the_import_works_and_a_region_says_why_not(
    platform: str, missing: tuple[str, ...]
) -> None:
    said = in_a_fresh_interpreter(ELSEWHERE.format(platform=platform, missing=missing))
    assert "Linux" in said


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert krex_jupyter.__version__ == project["version"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'exclusiv'"):
        _ = krex_jupyter.exclusiv


def test_every_public_name_is_listed_and_its_module_known() -> None:
    assert set(krex_jupyter.__all__) <= set(dir(krex_jupyter))
    assert set(krex_jupyter.__all__) == set(krex_jupyter._WHERE)
    assert krex_jupyter.__all__ == sorted(krex_jupyter.__all__)


def test_every_error_is_a_krex_error_and_public() -> None:
    found = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert found <= set(krex_jupyter.__all__)
    for name in found:
        assert issubclass(getattr(krex_jupyter, name), krex_jupyter.KrexError)
    assert issubclass(krex_jupyter.WaitTimeout, TimeoutError)
    assert issubclass(krex_jupyter.DeviceNotFound, LookupError)


def test_importing_touches_no_file_and_no_coordinator(tmp_path: Path) -> None:
    environment = os.environ | {"KREX_SOCKET": str(tmp_path / "krex.sock"), "KREX_LOCK_DIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", "import krex_jupyter"],
        check=True,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE_S,
    )
    assert list(tmp_path.iterdir()) == []
