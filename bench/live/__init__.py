"""Measurements of machines that run; see bench/machines."""
