"""Transcripts: from a model's tokens to words with times, subtitles, and the formats of OpenAI's speech API."""
