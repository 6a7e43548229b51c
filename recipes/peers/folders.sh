#!/bin/sh
# The same two .gguf files in the forms that FlashSpec and OpenVINO GenAI take, for run.sh:
#
#     recipes/peers/folders.sh TARGET.gguf DRAFT.gguf OUTPUT
#
# Leaves OUTPUT/target and OUTPUT/draft (bfloat16, for transformers), OUTPUT/target-genai and OUTPUT/draft-genai (OpenVINO's
# 4 bits in groups of 128), and prints what run.sh wants in the environment. The exporter has an environment of its own, since
# it wants an older transformers.
set -eu
out=$3
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$here/../..
python=${PYTHON:-$root/.venv/bin/python}
mkdir -p "$out"
if [ ! -e "$out/env/done" ]; then
    "$python" -m venv "$out/env"
    grep '^torch==' "$root/constraints.txt" >"$out/env/constraints.txt"
    "$out/env/bin/pip" install -q --disable-pip-version-check -c "$out/env/constraints.txt" torch 'optimum-intel[openvino]==2.2.*'
    "$out/env/bin/pip" uninstall -q -y torchvision 2>/dev/null || true # its wheel does not match a torch for CPUs
    touch "$out/env/done"
fi
for role in target draft; do
    file=$1
    shift
    [ -e "$out/$role/config.json" ] || "$python" - "$file" "$out/$role" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

file, folder = Path(sys.argv[1]), sys.argv[2]
where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(
    **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.config.quantization_config = None
del model.config.quantization_config
model.save_pretrained(folder)
PYTHON
    [ -e "$out/$role-genai/openvino_model.bin" ] || "$out/env/bin/optimum-cli" export openvino --model "$out/$role" \
        --task text-generation-with-past --weight-format int4 --group-size 128 "$out/$role-genai"
done
echo "TARGET_FOLDER=$out/target DRAFT_FOLDER=$out/draft GENAI_TARGET=$out/target-genai GENAI_DRAFT=$out/draft-genai"
