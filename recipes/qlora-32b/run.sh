#!/usr/bin/env bash
# QLoRA of a 32B model on rows of 131,072 tokens: bash recipes/qlora-32b/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" qlora-32b gpu_8_ddp \
    --tokenizer Qwen/Qwen3-32B --length 131072 --pack wrapped -- "$@"
