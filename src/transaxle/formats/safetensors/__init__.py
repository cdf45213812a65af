"""The safetensors format: a header of our own strict reading, sharded folders, and drafts of new ones."""
