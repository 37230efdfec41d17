"""Hosts: accelerate, transformers' Trainer, TRL's SFTTrainer, launchers."""
