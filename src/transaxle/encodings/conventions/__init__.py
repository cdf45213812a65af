"""How each ecosystem (such as torchao or ModelOpt) stores quantized tensors: buffer names, config entries, scale
layouts.
"""
