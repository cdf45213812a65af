"""Live models (models in memory): loading and saving sharded models, and copying values between two sharded models."""
