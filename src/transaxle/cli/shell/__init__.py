"""What the program and the shell around it tell each other: completions, reports of bugs."""
