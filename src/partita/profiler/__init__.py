"""Measuring devices and links; the only planner-side package that runs torch."""
