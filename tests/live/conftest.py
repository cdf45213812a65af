"""The S3 server is that of the formats' tests."""

from __future__ import annotations

from tests.formats.s3_server import bucket, s3_server

__all__ = ["bucket", "s3_server"]
