"""What the train engine is asked about sampled turns before an update; one file each."""
