"""Tables by tracing: where a converter puts every number says what its table is."""
