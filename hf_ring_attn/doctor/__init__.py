"""The command ``doctor``: packages, machine and kernels (`report`, `machine`), and ranks that attend (`live`)."""
