"""Views of a checkpoint: its stored tensors shown decoded, encoded or cast, or with quantization scales in row-major
order.
"""
