"""Request bodies: bytes to a checked struct, or a refusal that names the field.

Bounds   the app's body limit (413); nesting as deep as the decoder goes
Errors   Refused 400 and 413
"""

from __future__ import annotations

import json
import re
from typing import NoReturn, TypeVar

import anyio.to_thread
import msgspec
from aiohttp import web

from strata.server.errors import Refused, bad_request
from strata.server.security import too_large

T = TypeVar("T")

_DECODE_ASIDE_BYTES = 256 * 1024  # a larger body is decoded in a thread, so that streams go on meanwhile
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?$", re.DOTALL)


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`. Raises Refused."""
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise too_large(request)
    try:
        data = await request.read()
    except web.RequestPayloadError:
        raise bad_request("the body ended early") from None
    if len(data) > _DECODE_ASIDE_BYTES:
        return await anyio.to_thread.run_sync(decode_body, data, kind)
    return decode_body(data, kind)


def decode_body(data: bytes, kind: type[T]) -> T:
    """Raises Refused."""
    if not data.strip():
        raise bad_request("the body is empty; a JSON object is needed")
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as error:
            if b"\\ud" not in data.lower():
                raise bad_request(f"the body is no JSON: {error}") from None
            return msgspec.convert(_with_lone_surrogates(data), kind)
    except msgspec.ValidationError as error:
        raise _of_validation(error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def _with_lone_surrogates(data: bytes) -> object:
    """JSON in which an escape may name half a character, as a client writes that cut its text in the middle of one."""
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except ValueError as error:
        raise bad_request(f"the body is no JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _of_validation(error: msgspec.ValidationError) -> Refused:
    """msgspec's message with the field in front: "temperature: expected `float` <= 100.0"."""
    match = _PLACE.match(str(error))
    what = match["what"] if match else str(error)
    place = match["place"] if match else None
    if missing := re.match(r"Object missing required field `(.*)`", what):
        place, what = f"{place}.{missing[1]}" if place else missing[1], "is missing"
    what = what[:1].lower() + what[1:]
    if not place:
        return bad_request(f"the body: {what}")
    return bad_request(f"{place}: {what}", place)
