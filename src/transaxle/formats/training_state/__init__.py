"""What a training job keeps beside the weights: optimizer state, parameter groups, other objects."""
