"""Who says which word: voices as vectors, clusters of them, and a label for each word."""

MOST = 20  # speakers of a recording
