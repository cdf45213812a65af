"""Repositories of a Hugging Face hub, read in ranges at one commit."""
