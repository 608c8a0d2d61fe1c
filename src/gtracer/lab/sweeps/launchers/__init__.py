"""Where the runs of a sweep are made."""
