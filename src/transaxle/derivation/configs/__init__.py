"""What configs and names say: sizes, conditions, and what to call things."""
