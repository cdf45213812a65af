"""Fixtures that several modules of this folder share."""

from tests.formats.faulty_proxy import proxy
from tests.formats.s3_server import bucket, s3_server

__all__ = ["bucket", "proxy", "s3_server"]
