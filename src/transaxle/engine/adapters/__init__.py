"""Adapters: what the files of peft change of the weights of a model."""
