"""What a shell asks of the program."""
