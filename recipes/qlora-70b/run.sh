#!/usr/bin/env bash
# QLoRA of a 70B model on rows of 131,072 tokens: bash recipes/qlora-70b/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" qlora-70b gpu_8_fsdp2 \
    --tokenizer meta-llama/Llama-3.1-70B --length 131072 --pack wrapped -- "$@"
