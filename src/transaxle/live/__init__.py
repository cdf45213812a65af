"""Live models: loading into, saving from and moving between sharded models. The rooms above the engine import torch."""
