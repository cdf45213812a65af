"""One upload by many workers: which parts a file has, who sends them, and what keeps them together until the commit."""
