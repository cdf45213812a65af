"""One plan carried out by many workers: items of work as data, who does them, and the commit."""
