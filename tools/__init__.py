"""What makes the repository's files and environments; none of it is served or benchmarked."""
