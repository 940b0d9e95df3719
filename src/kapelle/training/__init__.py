"""The training loop, and the modules that record, save, resume and show a run."""
