"""What credit and losses may ask about sampled turns before an update; one signal in each file."""
