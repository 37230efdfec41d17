"""Hosts: accelerate, transformers' Trainer, TRL's trainers, launchers."""
