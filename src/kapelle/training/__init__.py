"""The training loop, and modules that record, save, resume and display a run."""
