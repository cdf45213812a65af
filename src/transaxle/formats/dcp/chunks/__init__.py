"""The chunks of a DCP folder put together into tensors."""
