"""Checkpoint formats: how a checkpoint's files on disk are recognised, catalogued, read and written. A file name inside
a checkpoint can never lead outside the checkpoint's folder.
"""
