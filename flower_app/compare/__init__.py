"""Strategies and policies beside each other, by planning alone or trained."""
