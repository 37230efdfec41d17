#!/usr/bin/env bash
# LoRA on rows of 1,048,576 tokens: bash recipes/lora-1m/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" lora-1m gpu_8_fsdp2 \
    --tokenizer Qwen/Qwen3-8B --length 1048576 --pack wrapped -- "$@"
