"""A range of an object on S3, and only if the service says that it sent this one.

The client's own call takes whatever bytes come. This one is the same, but reads the answer's `Content-Range`.
"""

from __future__ import annotations

from typing import Any

from transaxle.formats.remote.web import check_range


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
