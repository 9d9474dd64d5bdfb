"""The public names mean the same before and after the package's own modules are loaded."""

from __future__ import annotations

import subprocess
import sys

import krex_jupyter

CHECK = """
import importlib, pkgutil
import krex_jupyter
before = {name: getattr(krex_jupyter, name) for name in krex_jupyter.__all__}
for found in pkgutil.iter_modules(krex_jupyter.__path__):
    if not found.name.startswith("_"):
        importlib.import_module("krex_jupyter." + found.name)
print([name for name, value in before.items() if getattr(krex_jupyter, name) is not value])
"""


def test_no_module_takes_the_place_of_a_public_name() -> None:
    from krex_jupyter.devices import cpu

    assert cpu.__name__ == "krex_jupyter.devices.cpu"
    assert krex_jupyter.devices.__module__ == "krex_jupyter.runtime.queries"
    run = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr
