"""llama.cpp's own server from the wheel `xllamacpp`: llama_server.py PORT TARGET.gguf THREADS [DRAFT.gguf [LONGEST]]

Its defaults, but for one sequence, a fixed context and the threads. LONGEST: of a draft (else its default).
"""

import sys
import time

import xllamacpp


def main(port: int, target: str, threads: int, draft: str | None = None, longest: str | None = None) -> None:
    """Load, and answer until killed."""
    params = xllamacpp.CommonParams()
    params.model.path = target
    params.n_ctx = 2048
    params.n_parallel = 1
    params.port = port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if draft is not None:
        own = params.speculative.draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        own.mparams.path = draft
        own.cpuparams.n_threads = own.cpuparams_batch.n_threads = threads
        if longest is not None:
            own.n_max = int(longest)
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
