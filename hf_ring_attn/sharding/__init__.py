"""Layouts, masks and plans as data: how tokens are sharded, and which query sees which key."""
