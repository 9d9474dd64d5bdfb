"""An authorizer for tests: everything is allowed but KREX."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth import AllowAllAuthorizer


class DenyKrex(AllowAllAuthorizer):
    """Denies the resource krex."""

    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        return resource != "krex" and super().is_authorized(handler, user, action, resource)
