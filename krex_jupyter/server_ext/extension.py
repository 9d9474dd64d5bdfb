"""The Jupyter server extension: makes the parts, wires them, and takes them down. Decides nothing itself.

Loading it must never harm a server: everything that can be slow or fail happens in the background after the
server runs, and a server whose host has no coordinator serves all it served before, saying why KREX does not
work in its log, in ``krex/api/status`` and on the event socket.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import DistributionFinder, MetadataPathFinder
from typing import Any

import msgspec
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.extension.application import ExtensionApp
from traitlets import Bool, Float, Int

from krex_jupyter import errors
from krex_jupyter.protocol import Event, FromCoordinator, Status, Unavailable

from . import announcements, provisioner, routes
from .changes import ChangeQueue
from .connection import Change, Link, active_link, set_active_link
from .kernels import ACTIONS_SCHEMA, Kernels
from .panel import panel_problem

_STANDARD_PROVISIONER = "local-provisioner"


class KrexExtension(ExtensionApp):
    """Coordinates exclusive device regions among the kernels of this host."""

    name = "krex_jupyter"
    load_other_extensions = True

    start_coordinator = Bool(
        True,
        config=True,
        help="Whether this server starts a coordinator where none runs. A system-wide one (systemd) is never "
        "started from here. False: only adopt one that runs already.",
    )
    use_provisioner = Bool(
        True,
        config=True,
        help="Whether kernels are started by krex-provisioner where nothing else was configured, so that a frozen "
        "kernel is thawed before it is interrupted or shut down. False: kernels are registered once they run and "
        "thawed just after an interrupt; shutting a frozen kernel down may take 5 s and end in a kill.",
    )
    request_limit_s = Float(
        5.0,
        config=True,
        min=0.1,
        help="Seconds that a REST request waits for the coordinator's answer before it fails with HTTP 503. "
        "At least 0.1; there is no unlimited.",
    )
    kernel_round_s = Float(
        10.0,
        config=True,
        min=0.5,
        help="Seconds between two rounds over all kernels of this server, which catch kernels that nothing "
        "announced and notebooks that were renamed. At least 0.5; there is no off.",
    )
    activity_round_s = Float(
        30.0,
        config=True,
        min=0.1,
        help="Seconds between two marks of activity while a region of this server's is queued or held, so that "
        "it is not culled meanwhile. Keep it below every culling time-out. At least 0.1; there is no off.",
    )
    browser_queue_length = Int(
        64,
        config=True,
        min=1,
        help="Changes (a count) that wait for one slow browser before they are replaced by one fresh snapshot. "
        "At least 1; there is no unlimited.",
    )

    # --- Jupyter's hooks, in the order they are called -------------------------------------------------------

    def initialize_settings(self) -> None:
        """Take over the provisioner, and have everything else start once the server's loop runs."""
        self._link: Link | None = None
        self._kernels: Kernels | None = None
        self._activity: asyncio.Task[None] | None = None
        self._queues: set[ChangeQueue] = set()
        self._factory: KernelProvisionerFactory | None = None
        self._stopped = False
        self.notices: list[str] = []
        self._choose_provisioner()
        # For the log only: a front end without the panel would not show a notice, and other clients need no panel.
        if problem := panel_problem():
            self.log.info("%s", problem)
        self._server.io_loop.add_callback(self._begin)

    def initialize_handlers(self) -> None:
        """Add the routes."""
        self.handlers.extend(routes.handlers(self))

    async def stop_extension(self) -> None:
        """Close the connection. The coordinator goes on: others use it, and it ends by itself."""
        self._stopped = True
        if self._factory is not None and self._factory.default_provisioner_name == provisioner.NAME:
            self._factory.default_provisioner_name = _STANDARD_PROVISIONER
        if self._kernels is not None:
            self._server.event_logger.remove_listener(
                schema_id=ACTIONS_SCHEMA, listener=self._kernels.on_action
            )
            await self._kernels.close()
        if self._activity is not None:
            self._activity.cancel()
            await asyncio.gather(self._activity, return_exceptions=True)
        if self._link is not None:
            if active_link() is self._link:
                set_active_link(None)
            await self._link.close()

    # --- For the routes ----------------------------------------------------------------------------------------

    async def ask(self, message: Any) -> FromCoordinator:
        """The coordinator's answer; raises `CoordinatorUnavailable` or `Refused`."""
        if self._link is None:
            raise errors.CoordinatorUnavailable("This server is still starting; KREX connects in a moment.")
        return await self._link.ask(message, timeout_s=self.request_limit_s)

    def next_request_id(self) -> int:
        """A request id for `ask`."""
        return self._link.next_request_id() if self._link is not None else 0

    def new_queue(self) -> ChangeQueue:
        """A queue of changes for one browser; it begins with the whole state."""
        queue = ChangeQueue(self.browser_queue_length, self._snapshot)
        self._queues.add(queue)
        return queue

    def _snapshot(self) -> Status | Unavailable:
        link = self._link
        if link is None:
            return routes.unavailable("This server is still starting; KREX connects in a moment.")
        status = link.snapshot
        return routes.unavailable(link.problem) if status is None else self.with_notices(status)

    def drop_queue(self, queue: ChangeQueue) -> None:
        """A browser went."""
        self._queues.discard(queue)

    def with_notices(self, status: Status) -> Status:
        """The snapshot with what this server has to say, too."""
        return msgspec.structs.replace(status, notices=(*status.notices, *self.notices))

    # --- Parts -----------------------------------------------------------------------------------------------

    @property
    def _server(self) -> Any:
        """The server that this extension is linked to. Its managers are replaceable, hence untyped."""
        return self.serverapp

    async def _begin(self) -> None:
        if self._stopped:
            return
        server = self._server
        announcements.register_schemas(server.event_logger)
        self._link = Link(
            on_change=self._on_change,
            log=self.log,
            label=f"Jupyter server {server.port}",
            may_start=self.start_coordinator,
        )
        set_active_link(self._link)
        self._link.start()
        self._kernels = Kernels(
            link=self._link,
            kernel_manager=server.kernel_manager,
            session_manager=server.session_manager,
            root_dir=server.root_dir,
            log=self.log,
            round_s=self.kernel_round_s,
        )
        server.event_logger.add_listener(schema_id=ACTIONS_SCHEMA, listener=self._kernels.on_action)
        self._kernels.start()
        self._activity = asyncio.get_running_loop().create_task(self._mark_activity(), name="krex-activity")

    def _on_change(self, change: Change) -> None:
        announcements.figures().take(change)
        announcements.emit(self._server.event_logger, change)
        if isinstance(change, Event) and change.kind in {"queued", "granted"}:
            self._touch(change.pid)
        if isinstance(change, Status):
            change = self.with_notices(change)
        elif isinstance(change, Event) and change.status is not None:
            change = msgspec.structs.replace(change, status=self.with_notices(change.status))
        for queue in self._queues:
            queue.push(change)

    async def _mark_activity(self) -> None:
        while True:
            self._touch()
            await asyncio.sleep(self.activity_round_s)

    def _touch(self, pid: int = 0) -> None:
        """Mark activity for the kernels that hold or wait; ``pid`` just began to, the snapshot may not know yet."""
        if self._link is None:
            return
        pids = {kernel_id: record.process.pid for kernel_id, record in self._link.kernels.items()}
        busy = announcements.busy_kernels(self._link.status, pids)
        busy |= {kernel_id for kernel_id, kernel_pid in pids.items() if kernel_pid == pid}
        announcements.touch_activity(self._server.web_app.settings, self._server.kernel_manager, busy)

    def _choose_provisioner(self) -> None:
        """Become the default provisioner of this process, where that takes nothing away from anybody."""
        factory = KernelProvisionerFactory.instance(parent=self.serverapp)
        why_not = ""
        if not self.use_provisioner:
            why_not = "it is switched off (KrexExtension.use_provisioner)"
        elif factory.default_provisioner_name != _STANDARD_PROVISIONER:
            why_not = f"{factory.default_provisioner_name} is configured"
        elif not provisioner_is_installed():
            # A default that cannot be found would leave the launcher empty.
            why_not = "this environment does not offer it; install krex-jupyter with pip to have it"
        if why_not:
            self.notices.append(
                f"Kernels of this server are not started by {provisioner.NAME}: {why_not}. They are registered once "
                f"they run, and thawed just after an interrupt; shutting a frozen kernel down may take 5 s."
            )
            self.log.info("KREX: %s", self.notices[-1])
            return
        factory.default_provisioner_name = provisioner.NAME
        self._factory = factory


def provisioner_is_installed(search_path: list[str] | None = None) -> bool:
    """Whether the entry point of `KrexProvisioner` can be found, on ``sys.path`` or a search path given."""
    context = (
        DistributionFinder.Context() if search_path is None else DistributionFinder.Context(path=search_path)
    )
    return any(
        entry.group == KernelProvisionerFactory.GROUP_NAME and entry.name == provisioner.NAME
        for distribution in MetadataPathFinder.find_distributions(context)
        for entry in distribution.entry_points
    )
