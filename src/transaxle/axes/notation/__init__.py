"""The notation of the tables that describe model families: name patterns, layout expressions, families and dialects."""
