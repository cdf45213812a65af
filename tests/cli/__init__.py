"""The command line, tested as it is used: arguments in, exit code and text out."""
