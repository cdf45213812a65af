"""DeepSpeed's checkpoints: of ZeRO 1 to 3, of tensor- and pipeline-parallel runs, and universal checkpoints."""
