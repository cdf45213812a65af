"""A web server may send anything: more than was asked for, all of a file where a part of it was, bytes without an end.

fsspec's client reads every answer to its end. This session stops it one byte after what was asked for.
"""

from __future__ import annotations

import re
from typing import Any

WEB = frozenset({"http", "https"})
"""Schemes of URLs that a web server answers."""
_LONGEST_PAGE = 16 << 20
"""Bytes of an answer to a request that asks for no range: a page that lists a folder."""
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class TooMuchError(OSError):
    """The server sends more than it was asked for."""


def _asked(headers: Any) -> int:
    found = _RANGE.fullmatch(headers.get("Range", ""))
    return int(found[2]) - int(found[1]) + 1 if found else _LONGEST_PAGE


async def session(**options: Any) -> Any:
    """Return a session for fsspec's client, whose answers are bounded; `options` are the client's own."""
    from aiohttp import ClientResponse, ClientSession

    class Response(ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                most, data = _asked(self.request_info.headers), bytearray()
                async for part in self.content.iter_any():
                    data += part
                    if len(data) > most:
                        self.close()
                        raise TooMuchError(f"the server sends more than the {most:,} bytes that it may")
                self._body = bytes(data)
            return self._body

    return ClientSession(response_class=Response, **options)
