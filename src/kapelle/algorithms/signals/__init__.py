"""What credit and losses need to know about sampled turns before an update; one signal in each file."""
