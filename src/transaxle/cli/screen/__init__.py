"""What people read: numbers, folded names, tables, refusals."""
