"""Object stores and web servers, through fsspec."""
