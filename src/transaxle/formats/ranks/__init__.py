"""Folders of torch files, one for each rank of a training job."""
