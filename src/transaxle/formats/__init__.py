"""Containers on disk: how each is recognised, catalogued, read and written. Names in their files never lead out of the
checkpoint's folder.
"""
