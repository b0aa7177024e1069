"""The image, built and run without a registry."""
