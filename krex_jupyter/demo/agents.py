"""The tuning agents: each drives one notebook's kernel and takes its candidates from one shared list.

An agent is a thread here and a process there: it writes a candidate's source, sends the notebook's cell, and
waits for what the kernel shows. Nothing in this module measures time that ends up in a result, except a
block's length; all timing happens in the kernels.
"""

from __future__ import annotations

import json
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .candidates import Language, Variant, write
from .server import DemoError, NotebookKernel

Policy: TypeAlias = Literal["none", "command", "region"]

_CELL_S = 120.0


@dataclass(frozen=True)
class Cells:
    """The cells of an example notebook that the agents execute, by their tags."""

    setup: tuple[str, ...]
    candidate: str
    alone: str

    @classmethod
    def read(cls, notebook: Path) -> Cells:
        """The tagged cells of ``notebook``."""
        tagged: dict[str, list[str]] = {}
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            for tag in cell["metadata"].get("tags", ()):
                tagged.setdefault(tag, []).append("".join(cell["source"]))
        return cls(tuple(tagged["setup"]), "\n".join(tagged["candidate"]), "\n".join(tagged["alone"]))


@dataclass(frozen=True)
class Trial:
    """One candidate, as one agent's kernel saw it."""

    agent: int
    variant: Variant
    result: dict[str, Any]


@dataclass(frozen=True)
class Block:
    """All candidates once, under one policy."""

    policy: Policy
    started_at: float
    elapsed_s: float
    trials: tuple[Trial, ...]


class Agents:
    """N agents with a kernel each."""

    def __init__(
        self, kernels: Sequence[NotebookKernel], cells: Cells, language: Language, device: str, seed: int
    ) -> None:
        self._kernels = kernels
        self._cells = cells
        self._language: Language = language
        self._device = device
        self._random = random.Random(seed)  # noqa: S311  an order, not a secret

    def set_up(self) -> None:
        """Run the set-up cells of every notebook, all at once."""

        def one(agent: int) -> None:
            for code in self._cells.setup:
                self._kernels[agent].execute(code, timeout_s=_CELL_S)

        self._together(one)

    def tune(self, policy: Policy, chosen: Sequence[Variant], done: Callable[[int], None]) -> Block:
        """Work through ``chosen`` in a random order; ``done`` is told how many are finished.

        What an earlier block compiled is dropped first.
        """
        for kernel in self._kernels:
            kernel.execute("kept.clear()", timeout_s=_CELL_S)
        waiting: queue.SimpleQueue[Variant] = queue.SimpleQueue()
        for variant in self._random.sample(list(chosen), len(chosen)):
            waiting.put(variant)
        trials: list[Trial] = []
        lock = threading.Lock()  # guards `trials` against two agents that finish at once

        def one(agent: int) -> None:
            while True:
                try:
                    variant = waiting.get_nowait()
                except queue.Empty:
                    return
                result = self._try(agent, policy, variant)
                with lock:
                    trials.append(Trial(agent, variant, result))
                    done(len(trials))

        started_at, started_s = time.time(), time.monotonic()
        self._together(one)
        return Block(policy, started_at, time.monotonic() - started_s, tuple(trials))

    def time_alone(self, *, backwards: bool) -> dict[str, list[float]]:
        """Time what the last block compiled, one notebook at a time: seconds per call, by name."""
        samples_s: dict[str, list[float]] = {}
        for kernel in reversed(self._kernels) if backwards else self._kernels:
            outcome = kernel.execute(self._cells.alone, timeout_s=_CELL_S)
            samples_s.update(outcome.results[0])
        return samples_s

    def _try(self, agent: int, policy: Policy, variant: Variant) -> dict[str, Any]:
        candidate = write(variant, self._language, secrets.token_hex(6))
        given = f"candidate = {candidate.payload()!r}\npolicy = {policy!r}\ndevice = {self._device!r}\n"
        outcome = self._kernels[agent].execute(given + self._cells.candidate, timeout_s=_CELL_S)
        if not outcome.results:
            raise DemoError(
                f"{self._kernels[agent].notebook} showed no result for {variant.name}: {outcome.text}"
            )
        result = outcome.results[0]
        if result["correct"] == variant.wrong:
            found, meant = ("right", "wrong") if variant.wrong else ("wrong", "right")
            raise DemoError(
                f"{variant.name} is {meant}, and the check found it {found}: the demo proves nothing"
            )
        return dict(result)

    def _together(self, work: Callable[[int], None]) -> None:
        """Run ``work`` for every agent at once; the first failure ends it. Ctrl-C comes through.

        The threads are daemons: on an interrupt the caller closes the websockets, which ends them.
        """
        failures: list[BaseException] = []

        def guarded(agent: int) -> None:
            try:
                work(agent)
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
                failures.append(error)

        threads = [
            threading.Thread(target=guarded, args=(agent,), name=f"agent-{agent + 1}", daemon=True)
            for agent in range(len(self._kernels))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not failures:
                thread.join(0.1)
        if failures:
            raise failures[0]
