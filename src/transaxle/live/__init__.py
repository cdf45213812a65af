"""Live models: load into, save from and move values between sharded models."""
