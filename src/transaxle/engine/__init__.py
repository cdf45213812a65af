"""Planning, executing, verifying and comparing conversions. A plan is plain data that already contains every
decision.
"""
