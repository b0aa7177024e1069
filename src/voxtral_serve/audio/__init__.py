"""Audio: decode files, find speech, and measure and raise levels. Imports no other room of the package."""
