"""What several test modules share: problems, twins, made-up data, and processes to run things in."""
