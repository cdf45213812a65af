"""Megatron-Bridge 0.6.2 as a peer: what it makes of the hub's tensors in real megatron-core 0.19.2 models, on a CPU.

It needs another transformers and megatron-core than the other peers, so that it runs in an environment of its own:
`make megatron` installs `requirements.txt` into `.venv-megatron` and runs the tests that are marked `megatron`.
"""
