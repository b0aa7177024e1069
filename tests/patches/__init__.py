"""A package, so that its conftest.py does not take the name of the one above."""
