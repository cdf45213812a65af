"""Folders that are written, under the training code of Megatron itself: see `peer`."""
