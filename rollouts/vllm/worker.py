"""The worker process that holds a vLLM engine.

Its owner starts it with ``python -m rollouts.vllm.worker``. The engine core runs in this same process
(VLLM_ENABLE_V1_MULTIPROCESSING=0, set by the owner), so that it ends with the process. With tensor_parallel
above 1 the engine starts further processes, in this process's group.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, TypeVar

import torch._dynamo
import vllm.envs as envs
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform

from common.worker_process import serve
from rollouts.vllm.folders import EXTENSION
from rollouts.vllm.messages import EngineOptions, Generated, GenerateRequest, TokenRow, sampling_params
from rollouts.vllm.options import KV_CACHE, WITHOUT_GPU, shape_folder

T = TypeVar("T")
NONE = ""
"""The weight version while not all weights are there."""


class OfflineEngine:
    """vLLM's offline engine behind the few requests that rounds need, which are its public methods. Every
    answer is (vLLM's version of the weights that it comes from, value)."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._asleep = False

    def start(self, options: EngineOptions, folder: str | None, version: str) -> tuple[str, None]:
        """Create the engine with the weights in ``folder``; None: from ``options.model_config`` alone, so
        that weights can be sent to it. An engine that compiles is made from the config alone in any case,
        since a round's folder is another one at each start (``shape_folder``)."""
        if folder and (options.enforce_eager or current_platform.is_cpu()):
            self._llm = self._built(options, folder, "auto")
        else:
            model_config = (Path(folder) / "config.json").read_text() if folder else options.model_config
            shape = shape_folder(model_config, Path(envs.VLLM_CACHE_ROOT))
            self._llm = self._built(options, str(shape), "dummy")
            if folder:
                self._llm.collective_rpc("read_weights", args=(folder,))
        self._llm.update_weight_version(version if folder else NONE)
        return self._answer(None)

    def _built(self, options: EngineOptions, folder: str, load_format: str) -> LLM:
        cpu = current_platform.is_cpu()
        if cpu:
            os.environ.pop(KV_CACHE, None)
            os.environ.update(WITHOUT_GPU)  # for the engine's other processes; torch has read it here
            torch._dynamo.config.disable = True
        return LLM(
            folder,
            load_format=load_format,
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=options.max_length,
            seed=0,
            tensor_parallel_size=options.tensor_parallel,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=options.enforce_eager or cpu,
            enable_sleep_mode=options.sleeps and not cpu,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=round(options.cpu_kv_cache_gb * 2**30) if cpu else None,
            max_num_seqs=options.max_sequences,
            generation_config="vllm",
            # log-probabilities of prompts are at temperature 1 in either mode
            logprobs_mode="raw_logprobs" if options.temperature == 1 else "processed_logprobs",
            worker_extension_cls=EXTENSION,
            weight_transfer_config=WeightTransferConfig(options.transfer) if options.transfer else None,
            enable_chunked_prefill=not cpu,
        )  # for a chunked prompt vLLM rewinds the random generator, impossible on a CPU

    def load(self, folder: str, version: str) -> tuple[str, None]:
        """Load the weights in ``folder`` in place, waking up first if asleep."""
        self._begin().collective_rpc("read_weights", args=(folder,))
        return self._end(version)

    def needs_head(self) -> tuple[str, bool]:
        """Return whether the engine needs the output head by name, even if it is tied to the embeddings."""
        return self._answer(self._started().collective_rpc("has_output_head")[0][0])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> tuple[str, None]:
        self._started().init_weight_transfer_engine({"init_info": init_info})
        return self._answer(None)

    def start_weight_update(self) -> tuple[str, None]:
        """Begin an update. The weights' memory wakes up first if asleep, because a sleeping engine does not
        survive an update."""
        self._begin().start_weight_update()
        return self._answer(None)

    def update_weights(self, update_info: Any) -> tuple[str, None]:
        self._started().update_weights({"update_info": update_info})
        return self._answer(None)

    def finish_weight_update(self, version: str) -> tuple[str, None]:
        self._started().finish_weight_update()
        return self._end(version)

    def _begin(self) -> LLM:
        llm = self._started()
        llm.update_weight_version(NONE)  # nothing may be sampled until all weights are there
        if self._asleep:
            llm.wake_up(tags=["weights"])
        return llm

    def _end(self, version: str) -> tuple[str, None]:
        llm = self._started()
        if self._asleep:
            llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not llm.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache of the old weights could not be dropped: requests are still running"
            )
        llm.update_weight_version(version)
        return self._answer(None)

    def sleep(self) -> tuple[str, None]:
        """Release the GPU memory of weights and KV cache. The weights are discarded, since the trainer sends
        the next ones anyway (level 2). This has no effect on a CPU."""
        llm = self._started()
        llm.sleep(level=2)
        llm.update_weight_version(NONE)
        self._asleep = True
        return self._answer(None)

    def generate(self, requests: list[GenerateRequest]) -> tuple[str, list[Generated]]:
        """Return one sample for each request, in order."""
        outputs = self._awake().generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [SamplingParams(**sampling_params(request), watermarking=False) for request in requests],
            use_tqdm=False,
        )
        return self._answer(list(map(_drawn, outputs)))

    def logprobs(self, rows: list[TokenRow]) -> tuple[str, list[list[float]]]:
        """Return log p(token | the tokens before it) of every token but the first, nats. Rows must be shorter
        than max_length."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": row} for row in rows]
        outputs = self._awake().generate(prompts, params, use_tqdm=False)
        return self._answer(
            [
                [step[token].logprob for token, step in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
                for row, output in zip(rows, outputs, strict=True)
            ]
        )

    def _answer(self, value: T) -> tuple[str, T]:
        return self._started().get_weight_version(), value

    def _started(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the engine has not been started")
        return self._llm

    def _awake(self) -> LLM:
        llm = self._started()
        if llm.get_weight_version() == NONE:
            raise RuntimeError("the engine has no weights: it sleeps, or was not sent all of them")
        return llm


def _drawn(output: RequestOutput) -> Generated:
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length"):  # such tokens would be trained on as a whole answer
        raise ValueError(f"vLLM aborted a sample, or it failed: finish_reason={sample.finish_reason}")
    assert sample.logprobs is not None
    values = tuple(step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True))
    return Generated(tuple(sample.token_ids), sample.finish_reason == "stop", values)


def main() -> None:
    engine = OfflineEngine()
    serve({name: getattr(engine, name) for name in dir(engine) if not name.startswith("_")})
    # vLLM looks for garbage twice while it shuts down, seconds for which the owner waits. Here it ends with
    # the process.
    gc.collect = lambda generation=2: 0


if __name__ == "__main__":
    main()
