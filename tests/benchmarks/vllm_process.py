"""One vLLM engine in its own process, run by the Python of an environment of its own.

It reads a request as one JSON line, loads and warms up, and says so; then each further line starts a
measurement and is answered with the tokens it made and the seconds it took. It imports nothing of this
project, and nothing of vLLM before the process is bound to its core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one core: a second process could only wait
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Answer requests until the input ends."""
    answers = _own_output()
    request = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.update(ENVIRONMENT)
    for answer in measured(request):
        print(json.dumps(answer), file=answers, flush=True)


def _own_output() -> IO[str]:
    """The standard output for answers alone: what vLLM prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def measured(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """First that it is ready, then one measurement for each line of input."""
    import vllm

    engine = vllm.LLM(**engine_arguments(request))
    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["eos_token_ids"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    engine.generate(prompts, sampling, use_tqdm=False)
    yield {"version": vllm.__version__}
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        yield {"seconds": seconds, "output_ids": texts}


def engine_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """What `LLM` is built from; a request without a drafter decodes plainly."""
    longest = max(len(prompt) for prompt in request["prompts"])
    arguments: dict[str, Any] = {
        "model": request["verifier"],
        "dtype": "float32",
        "max_num_seqs": request["slots"],
        "max_model_len": longest + request["max_new_tokens"] + request["block_size"] + 1,
        # The prompts are the same in every run: each must be read anew.
        "enable_prefix_caching": False,
        "seed": 0,
        # Compiling takes some ten minutes a model on one core, and leaves the matrix products as they are.
        "enforce_eager": True,
    }
    if request["drafter"] is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": request["drafter"],
            "num_speculative_tokens": request["block_size"],
        }
    return arguments


if __name__ == "__main__":
    main()
