"""Writes `labextension/src/protocol.ts` from the structs of `protocol.py`: what a browser may receive.

The browser gets JSON that it must not trust (another version of the server, a proxy's error page), so each
struct becomes two things: an interface, and a check that tells whether an unknown value has that shape. Both come
from one place, hence nothing is written twice; a test asserts that the file on disk is what this module says.

``python -m krex_jupyter.server_ext.typescript`` writes the file of a clone.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from krex_jupyter import protocol

ROOTS: tuple[type[msgspec.Struct], ...] = (
    protocol.Status,
    protocol.Event,
    protocol.Unavailable,
    protocol.History,
    protocol.RegionReport,
    protocol.ErrorBody,
)
"""What the event socket and the REST routes answer with; whatever these are made of follows."""

FILE = Path(__file__).parents[2] / "labextension" / "src" / "protocol.ts"

_HEAD = """\
// Generated from krex_jupyter/protocol.py by `python -m krex_jupyter.server_ext.typescript`; do not edit.
// Units are in the names: _s seconds, _bytes, _mhz, _c. Unix times are `at` and `started_at`.

import * as check from './check';

"""
_NAMED_LITERALS = ("EffectiveCpuPolicy", "Gate", "Vendor", "Verdict")
_PRIMITIVES: dict[Any, tuple[str, str]] = {
    str: ("string", "check.text"),
    bool: ("boolean", "check.truth"),
    int: ("number", "check.number"),
    float: ("number", "check.number"),
}


def source() -> str:
    """The whole file."""
    parts = [_HEAD]
    for name in _NAMED_LITERALS:
        values = get_args(getattr(protocol, name))
        parts.append(f"export type {name} = {' | '.join(_quoted(value) for value in values)};\n\n")
        parts.append(f"export const {_check_name(name)}: check.Check<{name}> = {_literal_check(values)};\n\n")
    parts += [_struct(struct) for struct in _in_order(ROOTS)]
    union = " | ".join(f"I{struct.__name__}" for struct in get_args(protocol.ToBrowser))
    checks = ", ".join(_check_name(struct.__name__) for struct in get_args(protocol.ToBrowser))
    parts.append("/** What the event socket carries. */\n")
    parts.append(f"export type ToBrowser = {union};\n\n")
    parts.append(
        f"export const checkToBrowser: check.Check<ToBrowser> = check.either<ToBrowser>({checks});\n"
    )
    return "".join(parts)


def main() -> int:
    """Write the file."""
    FILE.write_text(source(), encoding="utf-8")
    return 0


def _in_order(roots: tuple[type[msgspec.Struct], ...]) -> Iterator[type[msgspec.Struct]]:
    """Structs, each after those that it is made of."""
    seen: set[type[msgspec.Struct]] = set()

    def visit(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
        if struct in seen:
            return
        seen.add(struct)
        for hint in get_type_hints(struct).values():
            for part in _structs_in(hint):
                yield from visit(part)
        yield struct

    for root in roots:
        yield from visit(root)


def _structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        if not isinstance(argument, str):
            yield from _structs_in(argument)


def _struct(struct: type[msgspec.Struct]) -> str:
    name = struct.__name__
    hints = get_type_hints(struct)
    fields = [
        (field.encode_name, *_translated(hints[field.name])) for field in msgspec.structs.fields(struct)
    ]
    tag = struct.__struct_config__.tag
    if tag is not None:
        fields.insert(0, ("type", _quoted(tag), f"check.literal({_quoted(tag)})"))
    lines = [_doc(struct), f"export interface I{name} {{"]
    lines += [f"  {field}: {kind};" for field, kind, _ in fields]
    lines += ["}", "", f"export const {_check_name(name)}: check.Check<I{name}> = check.object<I{name}>({{"]
    lines += [f"  {field}: {checked}," for field, _, checked in fields]
    lines[-1] = lines[-1].rstrip(",")
    lines += ["});", "", ""]
    return "\n".join(lines)


def _doc(struct: type[msgspec.Struct]) -> str:
    text = inspect.cleandoc(struct.__doc__ or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")
    wrapped = textwrap.wrap(text.replace("``", "`"), 100)
    if len(wrapped) <= 1:
        return f"/** {''.join(wrapped)} */"
    return "\n".join(["/**", *(f" * {line}" for line in wrapped), " */"])


def _translated(hint: Any) -> tuple[str, str]:
    """TypeScript's type and check for a Python annotation."""
    for name in _NAMED_LITERALS:
        if hint == getattr(protocol, name):
            return name, _check_name(name)
    if hint in _PRIMITIVES:
        return _PRIMITIVES[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"I{hint.__name__}", _check_name(hint.__name__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(_quoted(value) for value in arguments), _literal_check(arguments)
    if origin in (Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
        kind, checked = _translated(next(argument for argument in arguments if argument is not type(None)))
        return f"{kind} | null", f"check.nullable({checked})"
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        kind, checked = _translated(arguments[0])
        return f"ReadonlyArray<{kind}>", f"check.list({checked})"
    if origin is tuple:
        members = [_translated(argument) for argument in arguments]
        return (
            f"readonly [{', '.join(kind for kind, _ in members)}]",
            f"check.pair({', '.join(checked for _, checked in members)})",
        )
    if origin is dict:
        # JSON's keys are text, whatever they were.
        kind, checked = _translated(arguments[1])
        return f"Readonly<Record<string, {kind}>>", f"check.record({checked})"
    raise TypeError(
        f"protocol.py uses {hint!r}, which this module cannot translate; teach `_translated` about it"
    )


def _check_name(name: str) -> str:
    return f"check{name}"


def _literal_check(values: tuple[Any, ...]) -> str:
    return f"check.literal({', '.join(_quoted(value) for value in values)})"


def _quoted(value: object) -> str:
    return f"'{value}'"


if __name__ == "__main__":
    sys.exit(main())
