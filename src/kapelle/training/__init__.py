"""The training loop, and what records, saves, resumes and shows a run."""
