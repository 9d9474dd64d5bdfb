"""The documentation says what the code does: its examples run, its names, codes, options and defaults exist."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from traitlets.config import Configurable

import krex_jupyter
from krex_jupyter import app, protocol
from krex_jupyter.coordinator.settings import Settings
from krex_jupyter.coordinator.verdict import Thresholds
from krex_jupyter.display import SIGNS
from krex_jupyter.magics import KrexMagics
from krex_jupyter.runtime import command
from krex_jupyter.runtime.statistics import Finding
from krex_jupyter.server_ext import announcements, connection, routes
from krex_jupyter.server_ext.extension import KrexExtension
from tests.conftest import Place
from tests.kernel_driver import running_kernel

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "krex_jupyter").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_THERE = ("## Not there yet", "## Not implemented")
"""Sections that name what does not exist."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the comment right above it."""

    page: Path
    line: int
    language: str
    marker: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = lines.index("```", at + 1)
        marker = re.fullmatch(r"<!-- (.*) -->", lines[at - 1].strip()) if at else None
        yield Block(
            page, at + 1, lines[at][3:].strip(), marker[1] if marker else "", "\n".join(lines[at + 1 : end])
        )
        at = end + 1


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks and without the sections on what does not exist."""
    kept: list[str] = []
    fenced = absent = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            absent = line in NOT_THERE if line.startswith("## ") else absent
            if not absent:
                kept.append(line)
    return "\n".join(kept)


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def page_of(name: str) -> str:
    return prose(ROOT / "docs" / name)


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """(header, rows) of each table in ``text``."""
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
        elif rows:
            yield rows[0], rows[2:]
            rows = []


def table(name: str, section: str) -> list[list[str]]:
    """The rows of the first table below a heading of a page."""
    _, found, below = page_of(name).partition(f"## {section}\n")
    assert found, f"{name} has no section {section!r}"
    return next(tables(below))[1]


def documented_defaults(rows: list[list[str]]) -> dict[str, Any]:
    return {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, *_ in rows}


# --- Examples -----------------------------------------------------------------------------------------------


@pytest.fixture
def commands(place: Place, tmp_path: Path) -> dict[str, str]:
    """An environment in which ``krex`` and ``python`` are this package's and this interpreter."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, what in (
        ("krex", f'"{sys.executable}" -m krex_jupyter.app'),
        ("python", f'"{sys.executable}"'),
    ):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {what} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "KREX_DEVICE": "cpu",
    }


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_a_python_example_runs(block: Block, commands: dict[str, str], tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.body],
        env=commands,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("block", all_blocks("console"), ids=str)
def test_a_console_example_runs(block: Block, commands: dict[str, str], tmp_path: Path) -> None:
    asked = re.fullmatch(r"run(?:: exit (\d+))?", block.marker)
    assert asked, f"{block} is not marked: <!-- run --> or <!-- run: exit N -->"
    lines = [line[2:] for line in block.body.splitlines() if line.startswith("$ ")]
    assert lines
    for other in blocks(block.page):
        if other.marker.startswith("file: "):
            (tmp_path / other.marker.removeprefix("file: ")).write_text(other.body, encoding="utf-8")
    for line in lines:
        run = subprocess.run(
            ["bash", "-c", line], env=commands, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == int(asked[1] or 0), f"{line}: {run.returncode}\n{run.stdout}{run.stderr}"


@pytest.mark.parametrize(
    "page", sorted({block.page for block in all_blocks("ipython")}), ids=lambda p: p.name
)
def test_the_cells_of_a_page_run_in_a_kernel(page: Path, commands: dict[str, str]) -> None:
    with running_kernel(**commands) as kernel:
        for block in blocks(page):
            if block.language == "ipython":
                cell = kernel.run(block.body)
                assert cell.reply["status"] == "ok", f"{block}: {cell.traceback}"


def test_every_language_of_a_block_is_one_that_is_looked_at() -> None:
    known = ("python", "console", "ipython", "json", "toml", "text")
    assert [str(block) for page in PAGES for block in blocks(page) if block.language not in known] == []


# --- Links and names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def source_words() -> frozenset[str]:
    texts = [path.read_text(encoding="utf-8") for path in [*SOURCES, ROOT / "pyproject.toml"]]
    return frozenset(re.findall(r"\w+", "\n".join(texts)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_names_exist(page: Path) -> None:
    missing = []
    for name in sorted(quoted(prose(page))):
        if re.fullmatch(r"krex\.\w+", name):
            exists = hasattr(krex_jupyter, name.partition(".")[2]) or name == "krex.sock"
        elif re.fullmatch(r"(krex_jupyter|docs|tests|benchmarks|examples)/[\w./]*", name):
            exists = (ROOT / name).exists()
        elif re.match(r"krex [a-z]", name):
            exists = name.split()[1] in subcommands() or name.split()[1] == "demo"
        elif re.fullmatch(r"[A-Za-z]\w*", name) and (
            "_" in name or re.search(r"[a-z][A-Z]", name) or name[0].isupper()
        ):
            # A counter has this ending on /metrics, and not in the code.
            word = name.removesuffix("_total") if name.startswith("krex_") else name
            exists = word in source_words() or name in KNOWN_ELSEWHERE
        else:
            continue
        if not exists:
            missing.append(name)
    assert missing == []


KNOWN_ELSEWHERE = {
    "HOME",
    "TMPDIR",
    "WUNTRACED",  # of waitpid(2)
}


# --- Verdicts -----------------------------------------------------------------------------------------------


def calls(path: str, *names: str) -> Iterator[ast.Call]:
    """Calls of a function or method of one of these names in a source file."""
    for node in ast.walk(ast.parse((ROOT / "krex_jupyter" / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
            yield node


def test_the_page_of_verdicts_names_the_reasons_that_the_code_can_say() -> None:
    said = set()
    for call in calls("coordinator/verdict.py", "say"):
        verdict, code = call.args[:2]
        assert isinstance(verdict, ast.Constant)
        assert isinstance(code, ast.Constant)
        said.add((code.value, verdict.value))
    documented = {(code.strip("`"), verdict) for code, verdict, *_ in table("verdicts.md", "Reasons")}
    assert documented == said


def test_the_page_of_verdicts_names_the_reasons_that_a_measurement_adds() -> None:
    said = set(get_args(get_type_hints(Finding)["code"]))
    for call in calls("runtime/measure.py", "Reason"):
        (code,) = (keyword.value for keyword in call.keywords if keyword.arg == "code")
        if isinstance(code, ast.Constant):
            said.add(code.value)
    assert {code.strip("`") for code, *_ in table("verdicts.md", "Reasons that a measurement adds")} == said


def test_the_page_of_verdicts_names_every_verdict_with_its_sign() -> None:
    (_, rows), *_ = tables(page_of("verdicts.md"))
    assert {verdict.strip("`"): sign for verdict, sign, _ in rows} == SIGNS


def test_the_page_of_verdicts_has_the_thresholds_of_the_code() -> None:
    found = {field.name: field.default for field in dataclasses.fields(Thresholds)}
    assert documented_defaults(table("verdicts.md", "Thresholds")) == found


def test_the_page_of_verdicts_says_why_a_region_can_be_revoked() -> None:
    causes = set(get_args(get_type_hints(protocol.Undone)["code"]))
    for call in calls("coordinator/daemon.py", "_revoke"):
        if isinstance(call.args[1], ast.Constant):
            causes.add(call.args[1].value)
    daemon = (ROOT / "krex_jupyter/coordinator/daemon.py").read_text(encoding="utf-8")
    region = (ROOT / "krex_jupyter/runtime/region.py").read_text(encoding="utf-8")
    causes |= set(re.findall(r'\("(owner_died|connection_lost)"', daemon))
    causes |= set(re.findall(r"ended early \((\w+)\)", region))
    documented = {code.strip("`") for code, _ in table("verdicts.md", "Why a region is revoked")}
    assert documented == causes


# --- Command line -------------------------------------------------------------------------------------------


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


@cache
def subcommands() -> dict[str, argparse.ArgumentParser]:
    found = choices(app._parser())
    return {**found, "run": command._parser("run"), "region": command._parser("region")}


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def test_the_page_of_the_command_line_has_every_subcommand() -> None:
    (_, rows), *_ = tables(page_of("command-line.md"))
    assert {name.strip("`").removeprefix("krex ") for name, _ in rows} == set(subcommands())


@pytest.mark.parametrize("name", ["run", "region"])
def test_the_page_of_the_command_line_has_every_option_of(name: str) -> None:
    column = {"run": 1, "region": 2}[name]
    rows = table("command-line.md", "`krex run` and `krex region`")
    documented = set().union(*(quoted(row[0]) for row in rows if row[column] == "yes"))
    assert documented == options(subcommands()[name])


@pytest.mark.parametrize(
    "name", ["serve", "demo", *(f"bench {name}" for name in choices(subcommands()["bench"]))]
)
def test_the_page_of_the_command_line_lists_the_options_of(name: str) -> None:
    first, *rest = name.split()
    parser = choices(subcommands()[first])[rest[0]] if rest else subcommands()[first]
    if name == "serve":
        rows = table("command-line.md", "`krex serve`")
    else:
        rows = next(
            rows
            for header, rows in tables(page_of("command-line.md"))
            if header[0] == f"option of `krex {name}`"
        )
    assert set().union(*(quoted(row[0]) for row in rows)) == options(parser)


def test_the_page_of_the_command_line_mentions_every_option_of_the_others() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name in ("devices", "status", "history", "thaw"):
        for action in subcommands()[name]._actions:
            long = [option for option in action.option_strings if option.startswith("--")]
            assert long == ["--help"] or any(option in text for option in long), (name, action.option_strings)


def test_the_page_of_the_command_line_has_every_exit_code() -> None:
    commands, others = (
        {row[0] for row in rows} for header, rows in tables(page_of("command-line.md")) if header[0] == "code"
    )
    own = {app.USAGE, command.FAILED, command.WAITED_TOO_LONG, command.NOT_EXCLUSIVE}
    own |= {command.CANNOT_EXECUTE, command.NOT_FOUND, 130}
    assert commands == {*map(str, own), "128+n"}
    assert others == {
        *map(str, (0, 1, app.USAGE, app.NO_COORDINATOR, app.WAITED_TOO_LONG, app.NOT_EXCLUSIVE, 130))
    }


# --- Configuration ------------------------------------------------------------------------------------------


def test_the_page_of_configuration_has_every_setting_with_its_default() -> None:
    documented = documented_defaults(table("configuration.md", "The coordinator's settings"))
    assert documented == msgspec.structs.asdict(Settings())


@pytest.mark.parametrize(
    ("section", "configurable"), [("The server extension", KrexExtension), ("The magics", KrexMagics)]
)
def test_the_page_of_configuration_has_every_trait_of(section: str, configurable: type[Configurable]) -> None:
    traits = configurable.class_own_traits(config=True)
    documented = documented_defaults(table("configuration.md", section))
    assert documented == {name: trait.default() for name, trait in traits.items()}


def test_the_page_of_configuration_has_every_environment_variable_of_ours() -> None:
    used = {word for word in source_words() if re.fullmatch(r"KREX_[A-Z_]+[A-Z]", word)}
    documented = set().union(*(quoted(row[0]) for row in table("configuration.md", "Environment variables")))
    assert {name for name in documented if name.startswith("KREX_")} == used


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_an_example_of_settings_is_valid(block: Block) -> None:
    msgspec.convert(tomllib.loads(block.body), Settings)


# --- REST ---------------------------------------------------------------------------------------------------

JSON_TYPES: dict[str, Any] = {
    "Status": protocol.Status,
    "list[DeviceInfo]": list[protocol.DeviceInfo],
    "History": protocol.History,
    "Event": protocol.Event,
    "Unavailable": connection.Unavailable,
    "error": dict[str, str],
}


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_an_example_of_json_has_exactly_the_fields_that_are_sent(block: Block) -> None:
    example = json.loads(block.body)
    kind = block.marker.removeprefix("json: ")
    sent = msgspec.json.decode(msgspec.json.encode(msgspec.convert(example, JSON_TYPES[kind])))
    assert sent == example


def test_the_page_of_rest_has_every_route() -> None:
    paths = {pattern.replace("([^/]+)", "ID") for pattern, *_ in routes.handlers(None)}
    (_, rows), *_ = tables(page_of("rest-api.md"))
    assert {row[0].strip("`").split()[1] for row in rows} == paths


def test_the_page_of_rest_has_every_error() -> None:
    documented = {
        code: int(status) for status, codes in table("rest-api.md", "Errors") for code in quoted(codes)
    }
    del documented["Retry-After: 5"]
    assert documented == {**routes._HTTP_STATUS, "no_coordinator": 503}


def test_the_page_of_rest_has_every_event_and_figure() -> None:
    text = page_of("rest-api.md")
    for kind in announcements.ANNOUNCED:
        assert f"`{kind}`" in text
    registry = CollectorRegistry()
    announcements.Figures(registry)
    for metric in registry.collect():
        assert f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`" in text
