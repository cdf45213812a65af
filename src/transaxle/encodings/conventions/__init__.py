"""How each ecosystem stores an encoding: names of buffers, config entries, scale layouts."""
