"""Planning, executing, verifying and comparing conversions; a plan is plain data that already holds every decision."""
