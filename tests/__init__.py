"""Tests, grouped by tier; see CONTRIBUTING.md."""
