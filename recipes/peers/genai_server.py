"""OpenVINO GenAI behind completions: genai_server.py PORT TARGET THREADS [DRAFT [LENGTH]]

TARGET, DRAFT: folders of OpenVINO models. LENGTH: tokens of every draft (5). $GENAI_PROPERTIES: a JSON object of OpenVINO's
further properties, {"INFERENCE_PRECISION_HINT": "f32"} say for an audit.
"""

import json
import os
import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai
from completions import serve


def main(port: int, target: str, threads: int, draft: str | None = None, length: str = "5") -> None:
    """Load, and answer until killed."""
    settings = {"INFERENCE_NUM_THREADS": threads, **json.loads(os.environ.get("GENAI_PROPERTIES", "{}"))}
    more: dict[str, Any] = {}
    if draft is not None:
        # With prefix caching, its default, 2026.4.1 fails in the second request ("content_length <= …") and stops drafting.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 2  # GB
        draft_model = openvino_genai.draft_model(draft, "CPU", **settings)
        more = {"draft_model": draft_model, "scheduler_config": scheduler}
    pipeline = openvino_genai.LLMPipeline(target, "CPU", **settings, **more)

    def answer(body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.do_sample = body["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p, config.rng_seed = body["temperature"], body["top_p"], body["seed"]
            if body["top_k"]:
                config.top_k = body["top_k"]
        if draft is not None:
            config.num_assistant_tokens = int(length)
        ids = np.array([body["prompt"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return list(pipeline.generate(inputs, config).tokens[0]), {}

    serve(port, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
