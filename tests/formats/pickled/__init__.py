"""Tests of the restricted pickle interpreter and of the assembler."""
