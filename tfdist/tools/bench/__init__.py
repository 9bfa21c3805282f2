"""`tfdist bench`: times the collectives of a job, using only the core."""
