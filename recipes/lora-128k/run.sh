#!/usr/bin/env bash
# LoRA on rows of 131,072 tokens: bash recipes/lora-128k/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" lora-128k gpu_8_fsdp2 \
    --tokenizer meta-llama/Llama-3.1-8B --length 131072 --pack wrapped -- "$@"
