"""What some tests need and not every environment has."""

from __future__ import annotations

import pytest

from krex_jupyter.server_ext.extension import provisioner_is_installed

needs_entry_point = pytest.mark.skipif(
    not provisioner_is_installed(),
    reason="the entry point krex-provisioner needs krex-jupyter installed with pip",
)
