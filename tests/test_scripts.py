"""The tests' own helpers: what a test starts is gone when it ends, however it detached itself."""

from __future__ import annotations

from tests.conftest import Place
from tests.scripts import Scripts, state_of, wait_until


def test_a_daemon_of_a_script_is_ended_with_the_scripts(place: Place) -> None:
    scripts = Scripts()
    script = scripts(
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if (pid := os.fork()):\n"
        "        print(pid, flush=True)\n"
        "        os._exit(0)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "sys.stdin.read()\n"
    )
    daemon = int(script.line())
    assert state_of(daemon)
    scripts.end()
    wait_until(lambda: state_of(daemon) in ("", "Z"), "the daemon is gone", 5.0)
