"""One file a command: options parsed, the engine called, the result printed."""
