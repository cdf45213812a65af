"""Reads and writes byte ranges of files: on local disks, in object stores, on web servers."""
