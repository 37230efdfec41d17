"""The command ``verify``: one model in a ring beside itself on one device, with probes for leaks."""
