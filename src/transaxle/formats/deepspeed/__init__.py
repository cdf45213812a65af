"""Reads DeepSpeed's checkpoints of ZeRO 1 to 3 and of tensor- and pipeline-parallel runs; reads and writes universal
checkpoints.
"""
