"""Bounded answers of web servers, which may send more than was asked for, a whole file instead of a part, another part,
or bytes without end.

fsspec's client of the web reads every answer to its end. This session stops it one byte after the requested ones. Its
client of S3 takes whatever bytes come; `s3_range` is the same, but reads the answer's `Content-Range`.
"""

from __future__ import annotations

import re
from typing import Any

WEB = frozenset({"http", "https"})
"""Schemes of URLs that a web server answers."""
_LONGEST_PAGE = 16 << 20
"""Cap on the bytes of an answer to a request without a range: a page that lists a folder."""
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")
_SENT = re.compile(r"bytes ([0-9]{1,20})-([0-9]{1,20})/", re.IGNORECASE)
_SHOWN = 60


class TooMuchError(OSError):
    """The server sends more than was requested."""


class OtherRangeError(OSError):
    """The server sends other bytes than those that were requested."""


def check_range(requested: str, sent: str) -> None:
    """Check what a server says of the bytes that it sends; one that says nothing is believed.

    Args:
        requested: the `Range` of the request, empty without one.
        sent: the `Content-Range` of the answer, empty without one.

    Raises:
        OtherRangeError: these are other bytes.
    """
    wanted, found = _RANGE.fullmatch(requested), _SENT.match(sent)
    if wanted and sent and (found is None or found[1] != wanted[1] or int(found[2]) > int(wanted[2])):
        raise OtherRangeError(f"{wanted[0]} was requested, but the server sent {sent[:_SHOWN]}")


def _asked(headers: Any) -> int:
    match = _RANGE.fullmatch(headers.get("Range", ""))
    return int(match[2]) - int(match[1]) + 1 if match else _LONGEST_PAGE


async def session(**options: Any) -> Any:
    """Return an aiohttp session for fsspec's client that bounds every answer; `options` are the client's own."""
    from aiohttp import ClientResponse, ClientSession

    class Response(ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                check_range(self.request_info.headers.get("Range", ""), self.headers.get("Content-Range", ""))
                most, data = _asked(self.request_info.headers), bytearray()
                async for part in self.content.iter_any():
                    data += part
                    if len(data) > most:
                        self.close()
                        raise TooMuchError(f"the server sent more than the {most:,} bytes that were requested")
                self._body = bytes(data)
            return self._body

    return ClientSession(response_class=Response, **options)


def s3_range(client: Any, path: str, start: int, stop: int) -> bytes:
    """Return a range of an object's bytes, as many of them as the service gives; raises what the client does.

    Args:
        client: s3fs.
        path: what it calls the object.
        start: first byte.
        stop: one past the last.
    """
    from fsspec.asyn import sync
    from s3fs.core import _error_wrapper, version_id_kw

    bucket, key, version = client.split_path(path)
    asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}", **version_id_kw(version)}

    async def read() -> bytes:
        answer = await client._call_s3("get_object", **asked, **client.req_kw)
        try:
            check_range(asked["Range"], answer.get("ContentRange", ""))
            return bytes(await answer["Body"].read())
        finally:
            answer["Body"].close()

    return bytes(sync(client.loop, _error_wrapper, read, retries=client.retries))
