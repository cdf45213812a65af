"""Fixtures that several modules of this folder share."""

from tests.formats.faulty_proxy import proxy
from tests.formats.gcs_server import gcs_server, google
from tests.formats.hub_server import hub
from tests.formats.s3_server import bucket, s3_server
from tests.formats.stores import memory, store

__all__ = ["bucket", "gcs_server", "google", "hub", "memory", "proxy", "s3_server", "store"]
