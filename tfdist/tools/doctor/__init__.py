"""`tfdist doctor`: what is wrong with a machine or a job, and how to mend it."""
