"""The rule language: parsed, never run as Python, and judged on rows of numbers."""
