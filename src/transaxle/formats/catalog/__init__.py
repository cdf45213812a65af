"""What a checkpoint holds: names, types, shapes, byte extents."""
