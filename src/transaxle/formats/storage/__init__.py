"""Bytes by offset: local files, object stores, web servers."""
