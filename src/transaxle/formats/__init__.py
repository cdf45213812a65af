"""Checkpoint formats: how a container on disk is recognised, catalogued, read and written. A file name inside a
checkpoint can never lead outside of the checkpoint's folder.
"""
