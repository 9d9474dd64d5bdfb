"""The browser's types are those of `protocol.py`, and both sides read the same messages."""

from __future__ import annotations

import json
import re
import tomllib

import msgspec
import pytest

from krex_jupyter import protocol
from krex_jupyter.server_ext import typescript
from tests.scripts import ROOT

from . import browser_messages


def test_the_file_of_the_labextension_is_what_protocol_py_says() -> None:
    assert typescript.FILE.read_text(encoding="utf-8") == typescript.source(), (
        "protocol.py changed: run python -m krex_jupyter.server_ext.typescript"
    )


def test_every_message_to_a_browser_and_every_field_of_it_is_translated() -> None:
    source = typescript.source()
    for struct in (protocol.Status, protocol.Event, protocol.Unavailable, protocol.RegionReport):
        body = re.search(rf"export interface I{struct.__name__} \{{(.*?)\n\}}", source, re.DOTALL)
        assert body is not None
        assert set(re.findall(r"^  (\w+):", body[1], re.MULTILINE)) - {"type"} == set(
            struct.__struct_fields__
        )


def test_a_type_that_cannot_be_translated_is_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match="complex"):
        typescript._translated(complex)


def test_the_messages_that_the_browsers_tests_parse_are_those_of_this_side() -> None:
    assert browser_messages.FILE.read_text(encoding="utf-8") == browser_messages.text(), (
        "run python -m tests.server_ext.browser_messages"
    )
    for name in ("status", "event", "status_event", "notice", "unavailable"):
        parsed = msgspec.json.decode(
            json.dumps(browser_messages.messages()[name]).encode(), type=protocol.ToBrowser
        )
        assert json.loads(msgspec.json.encode(parsed)) == browser_messages.messages()[name]


def test_the_versions_of_both_sides_agree() -> None:
    python = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    npm = json.loads((ROOT / "labextension" / "package.json").read_text(encoding="utf-8"))["version"]
    # npm wants a hyphen before what comes before a release, and a dot in it.
    assert re.sub(r"-dev\.(\d+)$", r".dev\1", npm) == python
