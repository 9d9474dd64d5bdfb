"""An installation without the panel says so, and works."""

from __future__ import annotations

from pathlib import Path

from krex_jupyter.server_ext.panel import NAME, panel_problem


def test_an_installation_without_the_panel_says_what_to_do(tmp_path: Path) -> None:
    assert "Node.js" in panel_problem([str(tmp_path)])


def test_a_panel_in_any_of_jupyters_data_directories_counts(tmp_path: Path) -> None:
    there = tmp_path / "second" / "labextensions" / NAME
    there.mkdir(parents=True)
    (there / "package.json").write_text("{}")
    assert panel_problem([str(tmp_path / "first"), str(tmp_path / "second")]) == ""
