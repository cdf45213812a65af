"""From numbered tensors to a table: numpy only, and nothing is known of any family."""
