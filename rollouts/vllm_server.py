"""An engine that is a separate vLLM server (started by ``vllm serve``), driven through its HTTP interface.
The interface takes and returns tokens, and has vLLM's weight transfer and vLLM's weight version.

``ServerEngine`` answers the requests of ``rollouts.vllm_worker``, so the sampler does not know which of the
two it has. ``check_servers`` asks a server about itself before anything is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import queue
import shlex
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as TooLate
from typing import Any

import httpx2

from common.errors import ConfigError, require
from common.worker_process import WorkerError
from rollouts.vllm_messages import EngineOptions, Generated, GenerateRequest, TokenRow, ended_by_itself
from rollouts.vllm_options import EXACT, WITHOUT_GPU

EXTENSION = "rollouts.vllm_backend.WorkerExtension"
TESTED = "0.32."
"""Prefix of the vLLM versions that this code was written for and tested with."""
KEY = "sampler.urls"
IN_FLIGHT = 512
"""Samples that a server is asked for at once. It queues those that it has no room for."""
ADAPTERS = "adapters-of-round-"
"""Prefix of the name of a round's adapters, which the version follows."""
NONE = ""
RESETS = 20
_ONE_TOKEN = {"max_tokens": 1, "detokenize": False}
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
ASK_S = 60.0
"""Seconds within which a server must answer a question about itself."""


class ServerEngine:
    """One server. Requests are answered in order; one thread at a time may use it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._thread = ThreadPoolExecutor(1)
        self._asked: list[Future[Any]] = []
        self._parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._doing: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._takes_adapters = False
        self._named: dict[str, str] = {}
        """the model that every request names if adapters are sent alone, else empty"""

    def send(self, method: str, *arguments: Any) -> None:
        self._asked.append(self._thread.submit(self._answer, method, arguments))

    def _answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        async def answer() -> Any:
            self._doing = (asyncio.get_running_loop(), asyncio.current_task())  # type: ignore[assignment]
            return await getattr(self, method)(*arguments)

        return asyncio.run(answer())

    def ready(self, seconds: float, part: Callable[[Any], None] | None = None) -> bool:
        """Return whether the reply to the oldest unanswered request is there, after waiting at most
        ``seconds``. ``part`` is called with what arrives before the reply."""
        wait([self._asked[0]], seconds)
        done = self._asked[0].done()  # read before the parts, so that none of them is missed
        while not self._parts.empty():
            found = self._parts.get()
            if part is not None:
                part(found)
        return done

    def receive(self, timeout: float, begun: float | None = None) -> Any:
        """Return the reply to the oldest unanswered request, within ``timeout`` seconds of ``begun`` (None:
        now). Raises WorkerError, which names the address."""
        spent = 0.0 if begun is None else time.monotonic() - begun
        try:
            return self._asked.pop(0).result(max(0.0, timeout - spent))
        except TooLate as error:
            raise WorkerError(f"{self.url} did not answer within {timeout:g} s") from error
        except (httpx2.HTTPError, KeyError, TypeError, ValueError) as error:
            raise WorkerError(f"{self.url}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Cancel what was asked of the server. The server itself keeps running, because it was not started by
        this process."""
        if self._doing is not None:
            loop, task = self._doing
            with contextlib.suppress(RuntimeError):  # the request was answered, and its loop is closed
                loop.call_soon_threadsafe(task.cancel)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- requests shared with rollouts.vllm_worker -----------------------------------------------------

    async def start(self, options: EngineOptions, folder: str | None, version: str) -> tuple[str, None]:
        self._takes_adapters = options.lora_rank > 0
        await self._versioned(NONE)
        await self._rpc("drop_weight_update")  # of a trainer that was killed or failed meanwhile
        if folder is not None and not self._takes_adapters:
            return await self.load(folder, version)
        await self._post("abort_requests", {})  # left over from a client that is gone
        return await self._versioned(NONE)

    async def load(self, folder: str, version: str) -> tuple[str, None]:
        """Load weights from a folder that the server can read too."""
        await self._versioned(NONE)
        if self._takes_adapters:
            await self._read_adapters(folder, f"{ADAPTERS}{version}")
        else:
            await self._rpc("read_weights", folder)
        return await self._fresh(version)

    async def _read_adapters(self, folder: str, name: str) -> None:
        """Load adapters under a name that is new to the server. If they replaced adapters of the same name,
        they would be read again at every step (vLLM 0.32 keeps ``load_inplace`` with the name)."""
        async with _client() as client:
            known = _content(await client.get(f"{self.url}/v1/models"))["data"]
            for old in (model["id"] for model in known if model["id"].startswith(ADAPTERS)):
                _refused(await client.post(f"{self.url}/v1/unload_lora_adapter", json={"lora_name": old}))
            body = {"lora_name": name, "lora_path": folder}
            _refused(await client.post(f"{self.url}/v1/load_lora_adapter", json=body))
        self._named = {"model": name}

    async def own_head(self) -> tuple[str, bool]:
        return await self._said((await self._rpc("has_own_head"))[0][0])

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> tuple[str, None]:
        await self._post("init_weight_transfer_engine", {"init_info": init_info})
        return await self._said(None)

    async def start_weight_update(self) -> tuple[str, None]:
        await self._versioned(NONE)
        await self._post("start_weight_update")
        return NONE, None

    async def update_weights(self, update_info: Any) -> tuple[str, None]:
        await self._post("update_weights", {"update_info": update_info})
        return await self._said(None)

    async def finish_weight_update(self, version: str) -> tuple[str, None]:
        await self._post("finish_weight_update")
        return await self._fresh(version)

    async def sleep(self) -> tuple[str, None]:
        """Keeps the memory, because the server has its own devices."""
        return await self._said(None)

    async def generate(self, requests: list[GenerateRequest]) -> tuple[str, None]:
        def take(place: int, reply: dict[str, Any]) -> None:
            self._parts.put([(place, _drawn(reply["choices"][0]))])

        await self._each([(list(one.prompt), sampling_params(one)) for one in requests], take)
        return await self._said(None)

    async def logprobs(self, rows: list[TokenRow]) -> tuple[str, list[list[float]]]:
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        replies = await self._each([(row, params) for row in rows])
        return await self._said(
            [
                [step[str(token)]["logprob"] for token, step in zip(row[1:], steps[1:], strict=True)]
                for row, steps in zip(rows, (reply["prompt_logprobs"] for reply in replies), strict=True)
            ]
        )

    # -- HTTP ------------------------------------------------------------------------------------------

    async def _each(
        self,
        asked: list[tuple[TokenRow, dict[str, Any]]],
        take: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the replies, in order. ``take`` is called with each reply as it arrives."""
        room = asyncio.Semaphore(IN_FLIGHT)
        async with _client() as client:

            async def one(place: int, token_ids: TokenRow, params: dict[str, Any]) -> dict[str, Any]:
                async with room:
                    body = {"token_ids": token_ids, "sampling_params": params, **self._named}
                    reply = _content(await client.post(f"{self.url}/inference/v1/generate", json=body))
                if take is not None:
                    take(place, reply)
                return reply

            return list(await asyncio.gather(*(one(i, *each) for i, each in enumerate(asked))))

    async def _fresh(self, version: str) -> tuple[str, None]:
        """Drop the cache of the old weights and set the version, once all of the new weights are there."""
        for _ in range(RESETS):
            if (await self._post("reset_prefix_cache"))["success"]:
                return await self._versioned(version)
            await asyncio.sleep(1.0)  # requests of a client that is gone are still being ended
        raise WorkerError(f"{self.url}: the prefix cache of the old weights could not be dropped")

    async def _versioned(self, version: str) -> tuple[str, None]:
        await self._post("update_weight_version", {"new_version": version})
        return version, None

    async def _said(self, value: Any) -> tuple[str, Any]:
        async with _client() as client:
            found = _content(await client.get(f"{self.url}/weight_info"))
        return str(found["weight_version"]), value

    async def _rpc(self, method: str, *arguments: str) -> Any:
        return (await self._post("collective_rpc", {"method": method, "args": list(arguments)}))["results"]

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with _client() as client:
            return _content(await client.post(f"{self.url}/{path}", json=body))


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return what every client would read anew, for longer than a short question takes."""
    return httpx2.create_ssl_context()


def _client() -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=IN_FLIGHT)
    return httpx2.AsyncClient(timeout=None, limits=limits, verify=_certificates())


def _refused(response: httpx2.Response) -> None:
    """Raise ValueError with the server's message if it refused the request."""
    if response.status_code != 200:
        raise ValueError(f"{response.status_code} for {response.url}: {response.text[:500]}")


def _content(response: httpx2.Response) -> dict[str, Any]:
    """Return the reply's JSON object. Raises ValueError as ``_refused`` does."""
    _refused(response)
    return dict(response.json()) if response.content else {}


def sampling_params(request: GenerateRequest) -> dict[str, Any]:
    """Return every field that could change a sample, as ``rollouts.vllm_worker`` does."""
    return {
        "n": 1,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def _drawn(choice: dict[str, Any]) -> Generated:
    finished = ended_by_itself(choice["finish_reason"])
    tokens, said = choice["token_ids"], choice["logprobs"]["content"]
    if [one["token_id"] for one in said] != tokens:
        raise ValueError("the log-probabilities are of other tokens than those that were drawn")
    return Generated(tuple(tokens), finished, tuple(one["logprob"] for one in said))


# -- checks of a server --------------------------------------------------------------------------------


def serve_command(model: str, options: EngineOptions, backend: str, port: int, cpu: bool) -> list[str]:
    """Return the command that starts a server which ``sampler.urls`` accepts, as words for a shell in this
    project's folder."""
    own = EXACT | (WITHOUT_GPU if cpu else {})
    words = ["env", "PYTHONPATH=.", "VLLM_SERVER_DEV_MODE=1", *(f"{k}={v}" for k, v in own.items())]
    words += [f"{UPDATING}=1"] if options.lora_rank else []
    words += ["python", "-m"]
    words += ["vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    words += ["--enable-scale-out", "--skip-tokenizer-init", "--generation-config", "vllm", "--seed", "0"]
    words += ["--dtype", options.dtype, "--max-model-len", str(options.max_length)]
    words += ["--logprobs-mode", logprobs_mode(options)]
    words += ["--worker-extension-cls", EXTENSION]
    if backend != "disk":
        words += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if options.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(options.lora_rank)]
        words += ["--lora-target-modules", *options.lora_modules]
    if options.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if cpu:
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--kv-cache-memory-bytes", str(options.cpu_kv_cache)]
    return words


def check_servers(
    urls: list[str], options: EngineOptions, backend: str, shape: dict[str, Any], command: list[str]
) -> list[int]:
    """Return the number of workers of each server. ``shape``: the fields of ``SHAPE`` in the config of the
    trainer's model. ``command``: starts a suitable server. Raises ConfigError with key, address and
    remedy."""
    return [_check(url.rstrip("/"), options, backend, shape, shlex.join(command)) for url in urls]


def _check(url: str, options: EngineOptions, backend: str, shape: dict[str, Any], command: str) -> int:
    version = str(_asked(url, "version", command)["version"])
    if not version.startswith(TESTED):
        raise ConfigError(
            KEY, url, f"is vLLM {version}; this was tested with {TESTED}x: install vllm=={TESTED}0 there"
        )
    said = _asked(url, "server_info?config_format=json", command)["vllm_config"]
    model, extension = said["model_config"], said["parallel_config"]["worker_extension_cls"]
    _require(extension == EXTENSION, url, f"was started without --worker-extension-cls {EXTENSION}", command)
    has = _asked(url, "collective_rpc", command, {"method": "model_shape"})["results"][0]
    other = [f"{name} {has[name]}, not {value}" for name, value in shape.items() if has[name] != value]
    _require(not other, url, f"serves another model, {model['model']}: {', '.join(other)}", command)
    wanted = {
        "--dtype": (str(model["dtype"]).removeprefix("torch."), options.dtype),
        "--logprobs-mode": (model["logprobs_mode"], logprobs_mode(options)),
        "--weight-transfer-config": (
            (said.get("weight_transfer_config") or {}).get("backend"),
            None if backend == "disk" else backend,
        ),
    }
    for flag, (found, value) in wanted.items():
        _require(value in (None, found), url, f"was started with {flag} {found}, not {value}", command)
    longest = model["max_model_len"]
    short = f"was started with --max-model-len {longest}, and model.max_length is {options.max_length}"
    _require(longest >= options.max_length, url, short, command)
    _asked(url, "inference/v1/generate", command, {"token_ids": [1, 1], "sampling_params": _ONE_TOKEN})
    return int(_asked(url, "get_world_size", command)["world_size"])


def without_adapters(urls: list[str], options: EngineOptions, command: list[str]) -> str | None:
    """Return the reason why one of the servers does not take such adapters alone; None if all do. Raises
    ConfigError."""
    for url in urls:
        said = _asked(url.rstrip("/"), "server_info?config_format=json", shlex.join(command))
        lora, updates = said["vllm_config"].get("lora_config"), said.get("vllm_env", {}).get(UPDATING)
        if not lora or not updates:
            return f"{url} was started without --enable-lora and {UPDATING}=1"
        if lora["max_lora_rank"] < options.lora_rank:
            return f"{url} was started with --max-lora-rank {lora['max_lora_rank']}, not {options.lora_rank}"
        places = lora["target_modules"]
        missing = sorted(set(options.lora_modules) - set(places)) if places else []
        if missing:
            return f"{url} was started with --lora-target-modules {' '.join(places)}: no {', '.join(missing)}"
    return None


def _require(condition: bool, url: str, said: str, command: str) -> None:
    require(condition, KEY, url, f"{said}; start a server there: {command}")


def logprobs_mode(options: EngineOptions) -> str:
    """Return which log-probabilities of sampled tokens vLLM reports. Those of prompts are at temperature 1 in
    either mode."""
    return "raw_logprobs" if options.temperature == 1 else "processed_logprobs"


def _asked(url: str, path: str, command: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    method = "GET" if body is None else "POST"
    try:
        response = httpx2.request(method, f"{url}/{path}", json=body, timeout=ASK_S, verify=_certificates())
        if response.status_code == 200:
            return dict(response.json())
        said = f"answers {response.status_code} to /{path} ({response.text[:200]})"
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        said = f"does not answer ({error or type(error).__name__})"
    except (TypeError, ValueError):
        said = f"answers /{path} with something that is no JSON object"
    raise ConfigError(KEY, url, f"{said}; start a server there: {command}")


def address_towards(url: str) -> str:
    """Return this machine's address as the server at ``url`` sees it."""
    host = httpx2.URL(url).host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((socket.gethostbyname(host), 9))  # nothing is sent
        return str(asked.getsockname()[0])


def alive(url: str) -> bool:
    """Return whether the server reports that its engine is healthy."""
    try:
        asked = f"{url.rstrip('/')}/health"
        return httpx2.get(asked, timeout=ASK_S, verify=_certificates()).status_code == 200
    except httpx2.HTTPError:
        return False
