"""Changes to host libraries: guarded, idempotent, undone by `uninstall`."""
