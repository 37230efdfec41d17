"""Gradients: averaged by DDP, FSDP2 or a program, the same on every rank."""
