"""Turn ``module:Class:argument`` into an object: how a test or a deployment replaces one of our parts.

The coordinator and the guardian are processes of their own, so a replacement (a simulated driver in CI, a
vendor's own gate) can only be handed to them as text. Whoever may choose that text starts those processes and
so could run any code anyway; it is never taken from a message.
"""

from __future__ import annotations

import importlib


def construct(spec: str) -> object:
    """``Class(argument)`` of ``module:Class:argument``, or ``Class()`` of ``module:Class``.

    Raises:
        ValueError: the text has another form, or names something that does not exist.
    """
    module_name, _, rest = spec.partition(":")
    class_name, separator, argument = rest.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"{spec!r} is not of the form module:Class or module:Class:argument")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{spec!r} cannot be used: {error}") from error
    made: object = factory(argument) if separator else factory()
    return made
