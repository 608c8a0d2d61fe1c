"""Many runs: studies, searches, and where their runs are made."""
