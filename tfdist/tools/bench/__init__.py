"""`tfdist bench`: times the collectives of a job through the core alone."""
