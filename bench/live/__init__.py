"""Measurements of running machines; see bench/machines."""
