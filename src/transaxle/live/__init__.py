"""Live models: loading and saving sharded models, and copying values between two sharded models."""
