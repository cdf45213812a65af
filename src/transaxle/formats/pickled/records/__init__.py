"""Records of a pickle that are alike: what may differ from one to the next, and reading many of them at once."""
