"""Layouts, masks and plans as data: who holds which token, and who sees whom."""
