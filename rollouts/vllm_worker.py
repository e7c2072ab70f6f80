"""The worker process that holds a vLLM engine: ``python -m rollouts.vllm_worker``. The only module that
imports vllm.

The engine core runs in this very process (VLLM_ENABLE_V1_MULTIPROCESSING=0, set by the owner), so that it
ends with it; with tensor_parallel above 1 the engine starts processes of its own, of this process's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from common.worker_process import serve
from rollouts.vllm_messages import EngineOptions, Generated, GenerateRequest, TokenRow

if TYPE_CHECKING:
    import torch


HEAD = "lm_head.weight"


class Engine:
    """vLLM behind the few requests that rounds need. Every answer is (version of the weights it comes from,
    value)."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._version: int | None = None
        self._asleep = False

    def start(self, options: EngineOptions, folder: str, version: int) -> tuple[int, None]:
        """Make the engine, with the weights in ``folder``."""
        cpu = current_platform.is_cpu()
        self._llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=options.max_length,
            seed=0,
            tensor_parallel_size=options.tensor_parallel,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=options.enforce_eager or cpu,
            enable_sleep_mode=options.sleeps and not cpu,
            enable_prefix_caching=True,
            max_num_seqs=options.max_sequences,
            generation_config="vllm",
            # of prompts they are at temperature 1 in either mode
            logprobs_mode="raw_logprobs" if options.temperature == 1 else "processed_logprobs",
            worker_extension_cls="rollouts.vllm_worker.WeightReader",
            enable_chunked_prefill=not cpu,
        )  # vLLM winds the random generator of a cut prompt back, which a CPU's cannot
        self._version = version
        return version, None

    def load(self, folder: str, version: int) -> tuple[int, None]:
        """Take the weights in ``folder`` in place, waking up first if asleep."""
        llm = self._started()
        self._version = None  # until all of it has succeeded, nothing may be drawn
        if self._asleep:
            llm.wake_up(tags=["weights"])
        llm.collective_rpc("read_weights", args=(folder,))
        if self._asleep:
            llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not llm.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache of the old weights could not be dropped: requests are still running"
            )
        self._version = version
        return version, None

    def sleep(self) -> tuple[None, None]:
        """Give back weights and KV cache (level 2): the next weights come from a file anyway. No effect on a
        CPU."""
        self._started().sleep(level=2)
        self._asleep, self._version = True, None
        return None, None

    def generate(self, requests: list[GenerateRequest]) -> tuple[int, list[Generated]]:
        """One sample a request, in order."""
        outputs = self._awake().generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [_sampling_params(request) for request in requests],
            use_tqdm=False,
        )
        drawn = []
        for output in outputs:
            sample = output.outputs[0]
            assert sample.logprobs is not None
            values = tuple(
                step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True)
            )
            drawn.append(Generated(tuple(sample.token_ids), sample.finish_reason == "stop", values))
        assert self._version is not None
        return self._version, drawn

    def logprobs(self, rows: list[TokenRow]) -> tuple[int, list[list[float]]]:
        """log p(token | what is before it) of every token but the first, nats. Rows must be shorter than
        max_length."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._awake().generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        assert self._version is not None
        return self._version, [
            [step[token].logprob for token, step in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
            for row, output in zip(rows, outputs, strict=True)
        ]

    def _started(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the engine has not been started")
        return self._llm

    def _awake(self) -> LLM:
        if self._version is None:
            raise RuntimeError(
                "the engine has no weights: it sleeps, or its last load failed; load weights first"
            )
        return self._started()


def _sampling_params(request: GenerateRequest) -> SamplingParams:
    """Every field that could change a sample, said outright. ``ignore_eos``: only our stop tokens end a
    sample, not the end token that the model's config names, which the engine would add to them."""
    return SamplingParams(
        n=1,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=request.seed,
        max_tokens=request.max_tokens,
        min_tokens=0,
        stop=None,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,
        bad_words=None,
        logit_bias=None,
        allowed_token_ids=None,
        watermarking=False,
        logprobs=0,
        prompt_logprobs=None,
        detokenize=False,
    )


class WeightReader:
    """Mixed into each of the engine's own workers (vLLM's worker_extension_cls), which so read the files
    themselves."""

    def read_weights(self, folder: str) -> None:
        """Take the safetensors files of a Hugging Face folder in place. Raises FileNotFoundError if there are
        none."""
        model = self.get_model()  # type: ignore[attr-defined]
        tied = self.model_config.hf_text_config.tie_word_embeddings  # type: ignore[attr-defined]
        has_head = any(
            name == HEAD for name, _ in model.named_parameters(remove_duplicate=False)
        )  # Gemma's has none: all in one
        tensors = checkpoint_tensors(Path(folder), add_head=tied and has_head)
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]


def checkpoint_tensors(folder: Path, add_head: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all in the folder's safetensors files; ``add_head``: with the embeddings as the
    output head if it is not there.

    A tied checkpoint is saved without its head, and an engine whose model has a head of its own (as vLLM's
    Llama and Qwen do on a CPU) would go on with the old one and report success.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    head, embeddings = False, None
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_tensor(name)
                head = head or name == HEAD
                if name.endswith("embed_tokens.weight"):
                    embeddings = tensor
                yield name, tensor
    if add_head and not head and embeddings is not None:
        yield HEAD, embeddings


def main() -> None:
    engine = Engine()
    serve(
        {
            "start": engine.start,
            "load": engine.load,
            "sleep": engine.sleep,
            "generate": engine.generate,
            "logprobs": engine.logprobs,
        }
    )


if __name__ == "__main__":
    main()
