"""Speaker labels on recordings of human voices: makes the recordings, and counts the words with the wrong speaker."""
