"""The zip form of torch files, byte by byte."""
