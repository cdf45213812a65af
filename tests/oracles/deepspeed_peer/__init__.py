"""DeepSpeed 0.19.8 as a peer: real checkpoints of tiny models, the truth about them, and real resumes."""
