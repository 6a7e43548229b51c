#!/bin/sh
# The contest with other projects in one run, each in an environment and a process of its own, on the same .gguf files:
#
#     recipes/peers/run.sh TARGET.gguf DRAFT.gguf OUTPUT [options of `outrider bench peers`]
#
# With TARGET_FOLDER and DRAFT_FOLDER in the environment, the same models as transformers loads them, FlashSpec takes part;
# with GENAI_TARGET and GENAI_DRAFT OpenVINO GenAI, which did not take a .gguf file here (2026.4.1). folders.sh makes them.
# Makes the environments under OUTPUT/env (once), starts the servers, runs, and stops them. Leaves OUTPUT/runs.jsonl (from
# which it goes on), OUTPUT/rates.svg and OUTPUT/result.json.
set -eu
target=$1 draft=$2 out=$3
shift 3
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$here/../..
outrider=${OUTRIDER:-$root/.venv/bin/outrider}
python=$(dirname -- "$outrider")/python
threads=${THREADS:-$(nproc)}
if [ -n "${TARGET_FOLDER:-}" ]; then : "${DRAFT_FOLDER:?is needed with TARGET_FOLDER}"; fi
if [ -n "${GENAI_TARGET:-}" ]; then : "${GENAI_DRAFT:?is needed with GENAI_TARGET}"; fi
mkdir -p "$out/env"

environment() { # NAME PACKAGES…
    name=$1
    shift
    [ -e "$out/env/$name/done" ] && return
    "$python" -m venv "$out/env/$name"
    "$out/env/$name/bin/pip" install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"
    touch "$out/env/$name/done"
}
versions=
version() { # ENVIRONMENT PACKAGE
    versions="$versions --version $2=$("$out/env/$1/bin/python" -c "from importlib.metadata import version as v; print(v('$2'))")"
}
# Whether a server is up: llama.cpp's answers 503 until its model is loaded.
up() { "$python" -c "import sys, urllib.request as r; r.urlopen('http://127.0.0.1:$1/health', timeout=2)" 2>/dev/null; }

pids=
trap 'kill $pids 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
start() { # PORT ENVIRONMENT SCRIPT ARGUMENTS…
    port=$1 name=$2 script=$3
    shift 3
    if up "$port"; then
        echo "port $port is taken: stop what listens there" >&2
        exit 1
    fi
    "$out/env/$name/bin/python" "$here/$script" "$port" "$@" >"$out/server-$port.log" 2>&1 &
    pids="$pids $!"
    echo "waiting for $script on port $port" >&2
    tries=0
    until up "$port" && kill -0 $! 2>/dev/null; do
        tries=$((tries + 1))
        if [ $tries -gt 300 ] || ! kill -0 $! 2>/dev/null; then
            echo "$script did not start:" >&2
            tail -5 "$out/server-$port.log" >&2
            exit 1
        fi
        sleep 1
    done
}
environment llama xllamacpp
version llama xllamacpp
start 8101 llama llama_server.py "$target" "$threads"
start 8102 llama llama_server.py "$target" "$threads" "$draft"
if [ -n "${GENAI_TARGET:-}" ]; then
    environment genai openvino-genai numpy
    version genai openvino-genai
    start 8103 genai genai_server.py "$GENAI_TARGET" "$threads"
    start 8104 genai genai_server.py "$GENAI_TARGET" "$threads" "$GENAI_DRAFT"
    set -- --server "GenAI=http://127.0.0.1:8103/v1" --server "GenAI + draft=http://127.0.0.1:8104/v1" "$@"
fi
if [ -n "${TARGET_FOLDER:-}" ]; then
    environment flashspec torch flashspec
    version flashspec flashspec
    start 8105 flashspec flashspec_server.py "$TARGET_FOLDER" "$threads" "$DRAFT_FOLDER"
    set -- --server "FlashSpec=http://127.0.0.1:8105/v1" "$@"
fi

case " $* " in # only what transformers' generate does with a draft needs it by that name
*" --no-generate "*) ;;
*) set -- --draft "$draft" "$@" ;;
esac
"$outrider" bench peers --target "$target" \
    --server "llama.cpp=http://127.0.0.1:8101/v1" --server "llama.cpp + draft=http://127.0.0.1:8102/v1" \
    --setup int4 --setup "int4 + $draft:num_tokens=32000" --setup "int4 + $draft" --setup "int4 + prompt-lookup" \
    --setup "int4 + prompt-lookup + $draft:num_tokens=32000" --setup int8 --setup "int8 + $draft:dtype=int4,num_tokens=32000" \
    --setup int4@openvino --setup "int4@openvino + $draft" \
    --setup "auto@llama.cpp" --setup "auto@llama.cpp + prompt-lookup" --setup "auto@llama.cpp + $draft" $versions \
    --log "$out/runs.jsonl" --plot "$out/rates.svg" "$@" >"$out/result.txt.new"
mv "$out/result.txt.new" "$out/result.txt"
cp "$out/runs.jsonl.result.json" "$out/result.json"
cat "$out/result.txt"
