"""Reports: checkpoints as pages for a browser, each one HTML file that needs nothing else."""
