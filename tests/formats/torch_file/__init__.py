"""Tests of the torch format: files that torch wrote, files that nobody should have written, and files that we write."""
