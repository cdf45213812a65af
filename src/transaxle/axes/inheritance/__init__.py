"""Tables as they are written: statements, and what a family or dialect takes over from another."""
