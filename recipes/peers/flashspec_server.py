"""FlashSpec behind completions: flashspec_server.py PORT TARGET THREADS DRAFT

TARGET, DRAFT: folders that transformers loads. bfloat16, its defaults otherwise.
"""

import sys
from typing import Any

import torch
from completions import serve
from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, TargetModel
from transformers import AutoModelForCausalLM


def main(port: int, target: str, threads: int, draft: str) -> None:
    """Load, and answer until killed."""
    torch.set_num_threads(threads)
    device, dtype = torch.device("cpu"), torch.bfloat16
    target_model, draft_model = (AutoModelForCausalLM.from_pretrained(name, dtype=dtype) for name in (target, draft))
    verifier = TargetModel(target, device, dtype, model=target_model)
    drafter = HuggingFaceDrafter(draft, device, dtype, model=draft_model)
    engines: dict[tuple[float, float], SpeculativeEngine] = {}

    def answer(body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        key = (float(body["temperature"]), float(body["top_p"]))
        if key not in engines:
            sampling = SamplingConfig(temperature=key[0], top_p=key[1]) if key[0] else SamplingConfig(temperature=0.0)
            engines[key] = SpeculativeEngine(FlashSpecConfig(device="cpu", sampling=sampling), [drafter], verifier)
        torch.manual_seed(body["seed"])
        result = engines[key].generate(torch.tensor([body["prompt"]]), max_new_tokens=body["max_tokens"])
        return result.output_ids[0, : result.n_tokens_generated].tolist(), {}

    serve(port, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
