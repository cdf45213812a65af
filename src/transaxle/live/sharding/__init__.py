"""What each rank holds of each tensor."""
