"""Who may talk to the server: keys, Host names, origins. And the one place where an exception becomes JSON.

Keys     with keys set, every path but those of OPEN_PATHS needs one, compared in constant time
Hosts    without keys, the Host header must be a loopback name, an address, the bound host or an allowed one, so that a
         web page cannot reach the server by pointing its own name at this machine (DNS rebinding)
Origins  a browser's page may call from the server's own origin, a trusted one, or one of `cors_origins`; only the last
         get CORS headers. A body that comes with an Origin must be JSON, which no form can send
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from .errors import Refused, failure
from .settings import Settings

log = logging.getLogger("strata.http")

OPEN_PATHS = frozenset({"/health", "/api/health"})
_CORS_METHODS = "GET, POST, OPTIONS"
_CORS_HEADERS = "Authorization, Content-Type, x-api-key, anthropic-version, anthropic-beta"
_CORS_MAX_AGE_S = "600"


def middlewares(settings: Settings) -> list[Middleware]:
    guard = Guard(settings)

    @web.middleware
    async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await answer_errors(request, handler)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        guard.check(request)
        return preflight() if request.method == "OPTIONS" else await handler(request)

    return [errors_as_json, guarded]


def cors_signal(settings: Settings) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Puts the CORS headers on every answer, streams and errors included, before it is sent."""

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and _listed(origin, settings.cors_origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"

    return add_headers


class Guard:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._hosts = {settings.host.lower(), *(host.lower() for host in settings.allowed_hosts)}

    def check(self, request: web.Request) -> None:
        """Raises Refused: 403 for Host and Origin, 415 for a body no page may send, 401 for the key."""
        if not self._keys:
            self._check_host(request)
        self._check_origin(request)
        if self._keys and request.method != "OPTIONS" and request.path not in OPEN_PATHS:
            self._check_key(request)

    def _check_host(self, request: web.Request) -> None:
        header = request.headers.get("Host")
        if header is None:  # no browser leaves it out
            return
        name = _host_name(header)
        if name not in self._hosts and not _is_local(name):
            raise Refused(403, f"the Host {name[:80]!r} is not allowed; add it to allowed_hosts, or set an API key")

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is None:
            return
        known = (*self._settings.trusted_origins, *self._settings.cors_origins)
        is_own = origin.partition("://")[2].lower() == request.headers.get("Host", "").lower()
        if request.method != "OPTIONS" and not is_own and not _listed(origin, known):
            raise Refused(403, f"the Origin {origin[:80]!r} is not allowed; see trusted_origins and cors_origins")
        if request.method == "POST" and not _is_json(request.content_type):
            raise Refused(415, f"the body of a page's request must be application/json, not {request.content_type}")

    def _check_key(self, request: web.Request) -> None:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(bearer.strip())
        offered = [key.encode("utf-8", "surrogateescape") for key in given if key]
        matches = [hmac.compare_digest(one, key) for one in offered for key in self._keys]
        if not any(matches):
            what = "is wrong" if offered else "is missing"
            refused = Refused(401, f"the API key {what}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
            refused.headers["WWW-Authenticate"] = "Bearer"
            raise refused


def preflight() -> web.Response:
    """OPTIONS of any path."""
    return web.Response(
        status=204,
        headers={
            "Allow": _CORS_METHODS,
            "Access-Control-Allow-Methods": _CORS_METHODS,
            "Access-Control-Allow-Headers": _CORS_HEADERS,
            "Access-Control-Max-Age": _CORS_MAX_AGE_S,
        },
    )


async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or its exception as the JSON error of the interface."""
    try:
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPNotFound:
        refused = Refused(404, f"there is no {request.path[:200]} here; the OpenAI interface begins at /v1")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods - {"OPTIONS", "HEAD"}))
        refused = Refused(405, f"{request.path} takes {allowed}, not {request.method[:20]}")
        refused.headers["Allow"] = allowed
    except web.HTTPRequestEntityTooLarge:
        refused = too_large(request)
    except ConnectionError:
        raise  # the client is gone; there is nobody to answer
    except Exception:
        log.exception("%s %s failed", request.method, request.path[:200])
        refused = failure()
    return web.json_response(refused.body(), status=refused.status, headers=refused.headers)


def too_large(request: web.Request) -> Refused:
    limit = request.client_max_size // (1024 * 1024)
    return Refused(413, f"the body is larger than {limit} MiB (STRATA_MAX_BODY_MIB)")


def _host_name(header: str) -> str:
    """The name of `name:port`, `[v6]:port` or `name`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


def _listed(origin: str, origins: tuple[str, ...]) -> bool:
    return "*" in origins or origin.lower() in {known.rstrip("/").lower() for known in origins}
