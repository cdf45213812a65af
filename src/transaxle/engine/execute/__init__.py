"""A plan carried out: work items, journal, resume."""
