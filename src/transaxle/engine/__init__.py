"""Planning, executing, verifying and comparing conversions: a plan is data, and its execution decides nothing."""
