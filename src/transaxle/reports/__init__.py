"""Reports: self-contained HTML pages about checkpoints, plans, conversions, differences and shardings of live
models.
"""
